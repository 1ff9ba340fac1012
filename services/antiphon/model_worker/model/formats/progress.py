"""Says how far loading is, and how long it will take."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

PAUSE_S = 1.0
"""Between two lines of the log."""


class Progress:
    """Counts bytes; logs a line a second while it lasts, and one at the end."""

    def __init__(self, total_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._clock = clock
        self._began_s = self._told_s = clock()

    def add(self, size_bytes: int) -> None:
        """Count what is in place."""
        self._done_bytes += size_bytes
        now_s = self._clock()
        if now_s - self._told_s < PAUSE_S:
            return
        self._told_s = now_s
        left = (self._total_bytes - self._done_bytes) / self._done_bytes
        log.info(
            "loading weights",
            extra={
                "done_bytes": self._done_bytes,
                "total_bytes": self._total_bytes,
                "seconds_left": round(left * (now_s - self._began_s), 1),
            },
        )

    def end(self) -> None:
        """Say how fast it was."""
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
