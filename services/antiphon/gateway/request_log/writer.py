"""Background writer of request records: bounded in bytes, never blocks the event loop.

Formatting and writing happen in its thread, which starts with the first record. A record that does
not fit into the queue is dropped and counted; so is one that cannot be written, which is logged
once a minute.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

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
