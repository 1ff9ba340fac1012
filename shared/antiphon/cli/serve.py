"""`antiphon serve`: run NATS and all services as processes on this machine."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from antiphon.bus.server import ServerFailed, ServerMissing
from antiphon.cli.arguments import load_arguments
from antiphon.config.errors import ConfigError
from antiphon.supervisor.fetch_models import fetch_models
from antiphon.supervisor.stack import CannotServe, ServiceStack
from antiphon.telemetry import log as logs

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from antiphon.config.settings import Settings

FAILED = 1
INTERRUPTED = 130


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
        console.print(
            f"antiphon serve: {error}", style="red", highlight=False, markup=False, soft_wrap=True
        )
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
