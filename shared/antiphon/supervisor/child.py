"""A service process: started, watched, restarted; and how processes are restarted and stopped."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import shutil
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from antiphon.config.load import write_yaml, yaml_text
from antiphon.service import main
from antiphon.telemetry.log import CANNOT_START
from antiphon.wire.base import Role

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import Callable, Mapping

    from antiphon.config.settings import Settings
    from antiphon.supervisor.ports import PortRange
    from antiphon.wire.ids import InstanceId

log = logging.getLogger(__name__)

WINDOW_S = 60.0
FIRST_PAUSE_S = 0.5
PAUSE_S_MAX = 15.0
LOG_TAIL_CHARS = 2000
_REFUSAL_BYTES_MAX = 1 << 16
"""Bytes at the end of a log that are searched for the reason of a failed startup."""
_REFUSAL = re.compile(rf": {CANNOT_START} (?:\S+ )*?reason=(.+)")
_OWN_ERRORS = 2
LOG_BYTES_MAX = 32 * 1024 * 1024
"""Maximum size of a log, and of the previous one: logs of months must not fill the disk."""


class Restarts:
    """No delay for the first death; a doubling delay from the second within a minute on."""

    def __init__(self) -> None:
        self._deaths: list[float] = []

    def pause_s(self, now: float) -> float:
        """Record a death at `now` and return the delay of the restart."""
        self._deaths = [at for at in self._deaths if now - at < WINDOW_S]
        self._deaths.append(now)
        repeated = len(self._deaths) - 1
        return min(FIRST_PAUSE_S * 2 ** (repeated - 1), PAUSE_S_MAX) if repeated else 0.0


async def stop_process(process: Process | None, timeout_s: float) -> bool:
    """Send SIGTERM; return whether the process had to be killed after `timeout_s`."""
    if process is None or process.returncode is not None:
        return False
    process.terminate()
    try:
        async with asyncio.timeout(timeout_s):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
        return True
    return False


@dataclass(kw_only=True)
class Child:
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
    _port: int = 0
    _log_start: int = 0
    """Length of the log when this incarnation started: earlier ones may have failed, too."""

    @property
    def log_path(self) -> Path:
        return self.log_folder / f"{self.instance}.log"

    def command(self, config: Path) -> tuple[str, ...]:
        """Return its command line, with settings in `config`; containers run the same one."""
        module = f"antiphon.{'model_worker' if self.role is Role.WORKER else self.role}"
        return (
            *(sys.executable, "-m", module, "--config", str(config)),
            *("--instance", self.instance, "--parent-pid", str(os.getpid())),
        )

    async def start(self) -> None:
        """Start the process; `OSError` if the machine cannot run one more, or has no free port.

        It gets its own session: Ctrl-C in the terminal is for the supervisor, which stops the
        services in order.
        """
        self._port = self.ports.allocate(self.instance)
        with ExitStack() as opened:
            config, descriptors = self._find_settings(opened)
            output = self._open_log(opened)
            self.process = await asyncio.create_subprocess_exec(
                *self.command(config),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**self.environment, "ANTIPHON_HEALTH__PORT": str(self._port)},
                start_new_session=True,
                pass_fds=descriptors,
            )

    def _open_log(self, opened: ExitStack) -> int:
        """The descriptor of its log, or our stderr: a full disk must not prevent a restart."""
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
            os.fchmod(descriptor, 0o600)  # earlier versions created it world-readable
        self._log_start = os.lseek(descriptor, 0, os.SEEK_END)
        return descriptor

    def _find_settings(self, opened: ExitStack) -> tuple[Path, tuple[int, ...]]:
        """Return its settings file, and the descriptors that the process must inherit to read it.

        The file is written again if it was deleted; if the disk is full, the process inherits it.
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
        return self.process is not None and self.process.returncode is None

    async def died(self) -> int:
        assert self.process is not None, "watched before it was started"
        return await self.process.wait()

    async def fails_to_start(self) -> None:
        """Wait for its end; start it again if its port was taken between its choice and its use."""
        taken = f":{self._port}: {os.strerror(errno.EADDRINUSE)}"
        await self.died()
        if self._port and taken in self.refusals():
            log.warning("port taken", extra={"instance": self.instance, "port": self._port})
            await self.start()
            await self.fails_to_start()

    async def keep_running(self, on_exit: Callable[[], None] = lambda: None) -> None:
        """Start it again whenever it has ended; `on_exit` is called at once when it has.

        Not if another process has, or may have, its name: that one is alive.
        """
        loop = asyncio.get_running_loop()
        while True:
            status = await self.died()
            if status not in (main.CANNOT_START, main.REPLACED):
                on_exit()
            pause_s = self.restarts.pause_s(loop.time())
            fields = {"instance": self.instance, "status": status, "pause_s": pause_s}
            log.warning("service died", extra=fields)
            await asyncio.sleep(pause_s)
            try:
                await self.start()
            except OSError as error:
                # Retried: `process` is still the dead one, so the next pause is longer.
                reason = {"instance": self.instance, "reason": str(error)}
                log.warning("service did not start", extra=reason)

    async def stop(self, timeout_s: float) -> None:
        if await stop_process(self.process, timeout_s):
            log.warning("service killed", extra={"instance": self.instance, "timeout_s": timeout_s})

    def kill(self) -> None:
        if self.process is not None and self.alive:
            self.process.kill()

    def trim_log(self) -> None:
        """Rotate the log if it is too long; its content replaces the previous log.

        The process does not take part: it appends, so its next line is the first of the new log.
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
        """Return why it cannot start, according to its log; empty if the log has no reason."""
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
        if not self.log_path.exists():
            return ""
        return self.log_path.read_text(errors="replace")[-LOG_TAIL_CHARS:].strip()


def _refusal(line: str) -> str:
    """Return the reason in a log line, text or JSON, of a failed startup; else an empty text."""
    try:
        if line.startswith("{"):
            record = msgspec.json.decode(line, type=_RefusedStart)
            return record.reason if record.event == CANNOT_START else ""
        found = _REFUSAL.search(line)
        reason = found[1] if found else ""
        return msgspec.json.decode(reason, type=str) if reason.startswith('"') else reason
    except msgspec.MsgspecError:  # a truncated line, or another event
        return ""


class _RefusedStart(msgspec.Struct):
    event: str = ""
    reason: str = ""
