"""Crash dumps: the requests of a gateway that crashes or receives SIGQUIT, as JSON lines."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from antiphon.gateway.request_log import lines
from antiphon.gateway.request_log.writer import make_folder, write_all

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from pathlib import Path
    from types import FrameType

    from antiphon.gateway.request_log.record import RequestRecord

log = logging.getLogger(__name__)

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
            text = lines.as_json(lines.dumped(record, now))
            left -= len(text)
            if left < 0:
                break
            texts.append(text)
        shown = records[: len(texts)]
        unfinished = sum(record.ended_unix_ms is None for record in shown)
        head = {
            "timestamp": lines.stamp(now),
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
            write_all(descriptor, lines.as_json(head) + b"".join(texts))
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
