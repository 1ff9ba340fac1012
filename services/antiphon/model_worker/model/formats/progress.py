"""Progress of loading, with the estimated time left."""

from __future__ import annotations

import logging
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TextIO

log = logging.getLogger(__name__)

PAUSE_S = 1.0
"""Between two log lines."""
FRAME_S = 0.1
"""Between two frames of the bar."""
WIDTH = 30
"""Characters of the bar."""
ERASED = "\r\033[K"


class LoadProgress:
    """Counts loaded bytes: a bar in a terminal, else a log line a second; a line at the end.

    Args:
        total_bytes: Expected in total.
        clock: Seconds.
        stream: The bar is drawn here if it is a terminal; stderr, like the log.
    """

    def __init__(
        self,
        total_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        stream: TextIO | None = None,
    ) -> None:
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._clock = clock
        self._began_s = self._reported_s = clock()
        chosen: TextIO | None = stream or sys.stderr  # None in a process without stderr
        self._terminal = chosen if chosen is not None and chosen.isatty() else None

    def add(self, size_bytes: int) -> None:
        """Count bytes that are loaded."""
        self._done_bytes += size_bytes
        now_s = self._clock()
        if now_s - self._reported_s < (FRAME_S if self._terminal else PAUSE_S):
            return
        self._reported_s = now_s
        left = (self._total_bytes - self._done_bytes) / self._done_bytes
        seconds_left = left * (now_s - self._began_s)
        if self._terminal is not None:
            self._draw(self._terminal, seconds_left)
            return
        log.info(
            "loading weights",
            extra={
                "done_bytes": self._done_bytes,
                "total_bytes": self._total_bytes,
                "seconds_left": round(seconds_left, 1),
            },
        )

    def end(self) -> None:
        """Log the total time and throughput."""
        if self._terminal is not None:
            self._terminal.write(ERASED)
            self._terminal.flush()
        seconds = self._clock() - self._began_s
        rate = self._done_bytes / seconds if seconds else 0.0
        log.info(
            "weights loaded",
            extra={
                "bytes": self._done_bytes,
                "seconds": round(seconds, 2),
                "megabytes_per_s": round(rate / 1e6),
            },
        )

    def _draw(self, terminal: TextIO, seconds_left: float) -> None:
        full = WIDTH * self._done_bytes // self._total_bytes
        terminal.write(
            f"{ERASED}loading weights [{'#' * full}{'.' * (WIDTH - full)}]"
            f" {self._done_bytes / 1e9:.2f} of {self._total_bytes / 1e9:.2f} GB,"
            f" {seconds_left:.0f} s left"
        )
        terminal.flush()
