"""One service of the machine: started, watched, started again."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
import signal
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from antiphon.config.yaml_file import write_yaml, yaml_text
from antiphon.supervisor.restarts import Restarts
from antiphon.telemetry.log import CANNOT_START
from antiphon.wire.base import Role

if TYPE_CHECKING:
    from collections.abc import Mapping

    from antiphon.config.settings import Settings
    from antiphon.supervisor.ports import PortRange
    from antiphon.wire.ids import InstanceId

log = logging.getLogger(__name__)

LOG_TAIL_CHARS = 2000
_REFUSAL_BYTES_MAX = 1 << 16
"""Of the end of a log, in which the reason of a refused start is looked for."""
_REFUSAL = re.compile(rf": {CANNOT_START} (?:\S+ )*?reason=(.+)")
_OWN_ERRORS = 2
LOG_BYTES_MAX = 32 * 1024 * 1024
"""Of a log and of the one before it: a process that runs for months must not fill the disk."""


@dataclass(kw_only=True)
class Child:
    """A service process, whichever life it is in."""

    role: Role
    instance: InstanceId
    settings: Settings
    config: Path
    log_folder: Path
    environment: Mapping[str, str]
    ports: PortRange
    process: asyncio.subprocess.Process | None = None
    restarts: Restarts = field(default_factory=Restarts)
    _settings_written: bool = False
    _log_start: int = 0
    """Length of the log when this life began: an earlier one may have been refused too."""

    @property
    def log_path(self) -> Path:
        """Where its lines go."""
        return self.log_folder / f"{self.instance}.log"

    def command(self, config: Path) -> tuple[str, ...]:
        """Its command line, with its settings in this file; the same that a container runs."""
        module = f"antiphon.{'model_worker' if self.role is Role.WORKER else self.role}"
        parent = ("--parent-pid", str(os.getpid()))
        return (
            *(sys.executable, "-m", module, "--config", str(config)),
            *("--instance", self.instance),
            *parent,
        )

    async def start(self) -> None:
        """Start a life of it.

        In a session of its own: Ctrl-C in the terminal is for the supervisor, which stops the
        services in order.

        Raises:
            OSError: The machine has no room for one more process, or no free port for it.
        """
        port = self.ports.allocate(self.instance)
        with ExitStack() as opened:
            config, descriptors = self._find_settings(opened)
            output = self._open_log(opened)
            self.process = await asyncio.create_subprocess_exec(
                *self.command(config),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**self.environment, "ANTIPHON_HEALTH__PORT": str(port)},
                start_new_session=True,
                pass_fds=descriptors,
            )

    def _open_log(self, opened: ExitStack) -> int:
        """Return where it writes: our own error output, where its log cannot be opened.

        A full disk must not keep a process from being started again.
        """
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        try:
            self.log_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self.log_path, flags, 0o600)
        except OSError as error:
            fields = {"instance": self.instance, "reason": str(error)}
            log.warning("log not opened; its lines come here", extra=fields)
            return _OWN_ERRORS
        opened.callback(os.close, descriptor)
        with suppress(OSError):
            os.fchmod(descriptor, 0o600)  # one of an earlier version was readable by all
        self._log_start = os.lseek(descriptor, 0, os.SEEK_END)
        return descriptor

    def _find_settings(self, opened: ExitStack) -> tuple[Path, tuple[int, ...]]:
        """Return the file of its settings, and what the process must inherit to read it.

        The file is written by the first life, and again if it was cleaned away under a long one.
        Where there is no room for that, the settings are handed over in memory.

        Raises:
            OSError: There is neither.
        """
        if self._settings_written and self.config.exists():
            return self.config, ()
        try:
            self.config.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_yaml(self.settings, self.config)
        except OSError as error:
            if not self._settings_written or not hasattr(os, "memfd_create"):
                raise
            fields = {"instance": self.instance, "reason": str(error)}
            log.warning("settings not written; handed over in memory", extra=fields)
            descriptor = os.memfd_create(self.config.name)
            opened.callback(os.close, descriptor)
            os.write(descriptor, yaml_text(self.settings).encode())
            return Path(f"/proc/self/fd/{descriptor}"), (descriptor,)
        self._settings_written = True
        return self.config, ()

    @property
    def alive(self) -> bool:
        """Whether its current life goes on."""
        return self.process is not None and self.process.returncode is None

    async def died(self) -> None:
        """Return when its current life has ended."""
        assert self.process is not None, "watched before it was started"
        await self.process.wait()

    async def keep_running(self) -> None:
        """Start it again whenever it dies, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            assert self.process is not None, "kept before it was started"
            status = await self.process.wait()
            pause_s = self.restarts.pause_s(loop.time())
            fields = {"instance": self.instance, "status": status, "pause_s": pause_s}
            log.warning("service died", extra=fields)
            await asyncio.sleep(pause_s)
            try:
                await self.start()
            except OSError as error:
                # Tried again: the life before still counts as dead, so the next pause is longer.
                reason = {"instance": self.instance, "reason": str(error)}
                log.warning("service did not start", extra=reason)

    async def stop(self, timeout_s: float) -> None:
        """Ask it to leave, and end it if it has not within `timeout_s`."""
        process = self.process
        if process is None or process.returncode is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(timeout_s):
                await process.wait()
        except TimeoutError:
            log.warning("service killed", extra={"instance": self.instance, "timeout_s": timeout_s})
            process.kill()
            await process.wait()

    def kill(self) -> None:
        """End it at once."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()

    def trim_log(self) -> None:
        """Begin the log anew if it is too long; what it held replaces the one before.

        The process is not asked: it appends, so its next line is the first of the new log.
        """
        try:
            if self.log_path.stat().st_size > LOG_BYTES_MAX:
                before = self.log_path.with_suffix(".1.log")
                before.touch(mode=0o600)
                before.chmod(0o600)
                shutil.copyfile(self.log_path, before)
                os.truncate(self.log_path, 0)
        except OSError as error:
            log.warning("log not trimmed", extra={"reason": str(error)})

    def refusals(self) -> str:
        """Return why it cannot start, as its log says it; empty if it does not say so."""
        try:
            with self.log_path.open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(self._log_start, end - _REFUSAL_BYTES_MAX))
                text = file.read().decode(errors="replace")
        except OSError:
            return ""
        found = filter(None, map(_refusal, text.splitlines()))
        return "; ".join(dict.fromkeys(found))

    def log_tail(self) -> str:
        """Return the end of its log."""
        if not self.log_path.exists():
            return ""
        return self.log_path.read_text(errors="replace")[-LOG_TAIL_CHARS:].strip()


def _refusal(line: str) -> str:
    """The reason on a line of a log in either form that says that a service cannot start."""
    try:
        if line.startswith("{"):
            written = msgspec.json.decode(line, type=_Refusal)
            return written.reason if written.event == CANNOT_START else ""
        found = _REFUSAL.search(line)
        reason = found[1] if found else ""
        return msgspec.json.decode(reason, type=str) if reason.startswith('"') else reason
    except msgspec.MsgspecError:  # a line that was cut off, or is of something else
        return ""


class _Refusal(msgspec.Struct):
    event: str = ""
    reason: str = ""
