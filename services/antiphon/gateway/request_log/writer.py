"""Writes request records in the background, and crash dumps.

Formatting and writing happen in the writer's thread, which starts with the first record and never
blocks the event loop. A record that does not fit into the queue is dropped and counted; so is one
that cannot be written, which is logged once a minute.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from antiphon.gateway.request_log.record import RequestRecord, as_json, dumped_line, stamp

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from types import FrameType

    from prometheus_client import Counter

log = logging.getLogger(__name__)


CLOSE_S = 1.5
"""How long a stopping process waits for queued records."""
QUIET_S = 60.0
"""Minimum interval between log messages about records that could not be written."""
_STDOUT = 1


class RecordWriter:
    """Runs writes in order, in one thread. `dropped` counts what was not written, by reason."""

    def __init__(self, bytes_max: int, dropped: Counter, now: Callable[[], float]) -> None:
        self._bytes_max = bytes_max
        self._dropped = dropped
        self._now = now
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="request-log")
        self._lock = threading.Lock()
        self._queued_bytes = 0
        self._used = False
        self._failed_at: float | None = None

    def put(self, size: int, write: Callable[[], None]) -> None:
        """Queue a record of about `size` bytes, or drop it."""
        with self._lock:
            fits = self._queued_bytes + size <= self._bytes_max
            self._queued_bytes += size if fits else 0
        if not fits:
            self._dropped.labels("queue_full").inc()
            return
        self._used = True
        self._executor.submit(self._run, size, write)

    async def close(self) -> None:
        """Write what is queued, for at most `CLOSE_S`."""
        if self._used:
            last = self._executor.submit(lambda: None)
            try:
                async with asyncio.timeout(CLOSE_S):
                    await asyncio.wrap_future(last)
            except TimeoutError:
                log.warning("request records not written", extra={"bytes": self._queued_bytes})
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _run(self, size: int, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            self._fail(str(error))
        except Exception:
            self._dropped.labels("failed").inc()
            log.exception("request record failed")
        finally:
            with self._lock:
                self._queued_bytes -= size

    def _fail(self, reason: str) -> None:
        self._dropped.labels("write_failed").inc()
        now = self._now()
        if self._failed_at is None or now - self._failed_at >= QUIET_S:
            self._failed_at = now
            log.error("request records not written", extra={"reason": reason})


class HourlyFile:
    """One file per hour (UTC): `<folder>/<stem>_<YYYYMMDD>_<HH><suffix>`, mode 600.

    Used by the writer thread only. A deleted file is created again.
    """

    def __init__(self, folder: Path, stem: str, suffix: str) -> None:
        self._folder = folder
        self._stem = stem
        self._suffix = suffix
        self._hour = ""
        self._descriptor: int | None = None
        self._torn = False  # whether the file ends within a line, after a partial write

    def write(self, line: bytes, unix_s: float) -> None:
        hour = time.strftime("%Y%m%d_%H", time.gmtime(unix_s))
        if self._descriptor is not None and (
            hour != self._hour or os.fstat(self._descriptor).st_nlink == 0
        ):
            self.close()
        if self._descriptor is None:
            make_folder(self._folder)
            path = self._folder / f"{self._stem}_{hour}{self._suffix}"
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            self._descriptor, self._hour = os.open(path, flags, 0o600), hour
        text = b"\n" + line if self._torn else line
        self._torn = True
        write_all(self._descriptor, text)
        self._torn = False

    def close(self) -> None:
        """Release the file; the next line opens one."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


class StandardOutput:
    def write(self, line: bytes, unix_s: float) -> None:
        del unix_s
        write_all(_STDOUT, line)

    def close(self) -> None:
        pass


def folder_of(name: str) -> Path:
    return Path(name).expanduser()


def make_folder(folder: Path) -> None:
    """Create a folder that only its owner can read; raise OSError if it is not writable."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{folder} is not writable")


def write_all(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


_NAMES_MAX = 100


class CrashDump:
    """Writes `<folder>/<host>/crash_dump_<time>.jsonl` once.

    The first line has counts; unfinished requests follow, then finished ones, the latest first, up
    to `bytes_max`.
    """

    def __init__(
        self, folder: Path, instance: str, *, bytes_max: int, unix_ms: Callable[[], int]
    ) -> None:
        self._folder = folder / socket.gethostname()
        self._instance = instance
        self._bytes_max = bytes_max
        self._unix_ms = unix_ms
        self._written = False

    def write(self, reason: str, records: Sequence[RequestRecord]) -> None:
        """Write the requests in order, unless a dump was written. Blocks; never raises."""
        if self._written:
            return
        self._written = True
        try:
            path = self._write(reason, records)
        except Exception as error:
            log.exception("crash dump not written", extra={"reason": str(error)})
        else:
            log.critical("crash dump written", extra={"file": str(path), "reason": reason})

    def _write(self, reason: str, records: Sequence[RequestRecord]) -> Path:
        now = self._unix_ms()
        texts: list[bytes] = []
        left = self._bytes_max
        for record in records:
            text = as_json(dumped_line(record, now))
            left -= len(text)
            if left < 0:
                break
            texts.append(text)
        shown = records[: len(texts)]
        unfinished = sum(record.ended_unix_ms is None for record in shown)
        head = {
            "timestamp": stamp(now),
            "event": "crash_dump",
            "reason": reason,
            "instance": self._instance,
            "unfinished": unfinished,
            "finished": len(shown) - unfinished,
            "left_out": len(records) - len(shown),
        }
        make_folder(self._folder)
        path, descriptor = self._open(now)
        try:
            write_all(descriptor, as_json(head) + b"".join(texts))
        finally:
            os.close(descriptor)
        return path

    def _open(self, now: int) -> tuple[Path, int]:
        # Two gateways on a host may crash in the same second.
        moment = time.strftime("%Y%m%d_%H%M%S", time.gmtime(now / 1000))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        for behind in ("", *(f"_{number}" for number in range(1, _NAMES_MAX))):
            path = self._folder / f"crash_dump_{moment}{behind}.jsonl"
            with suppress(FileExistsError):
                return path, os.open(path, flags, 0o600)
        raise FileExistsError(f"{self._folder} already has {_NAMES_MAX} crash dumps of {moment}")


@contextmanager
def dump_on_quit(dump: Callable[[str], None]) -> Generator[None]:
    """Call `dump` on SIGQUIT, then die by the signal as usual.

    Does nothing outside the main thread, which alone receives signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_quit(number: int, _: FrameType | None) -> None:
        try:
            dump("SIGQUIT")
        finally:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    before = signal.signal(signal.SIGQUIT, on_quit)
    try:
        yield
    finally:
        signal.signal(signal.SIGQUIT, before)
