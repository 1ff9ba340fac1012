"""Notices a batching loop that works on one thing for too long. Pure: it is told what it sees."""

from __future__ import annotations

import sys
import traceback
from enum import Enum


class StallVerdict(Enum):
    """How bad it is."""

    STALLED = "stalled"
    """Said once; a slow disk or a busy machine may still let it go on."""
    HUNG = "hung"
    """It will not go on: the process has to end, so that another one takes its place."""


class LoopHung(Exception):
    """The batching loop does not go on. It ends the process."""


class StallDetector:
    """Is shown the loop's pulse several times a second, and says when it stands still.

    The loop itself pays one assignment a step for it: time is taken here.
    """

    def __init__(self, *, stall_s: float, limit_s: float) -> None:
        self._stall_s = stall_s
        self._limit_s = limit_s
        self._pulse = -1
        self._since = 0.0
        self._reported = False

    def observe(self, pulse: int, now: float) -> StallVerdict | None:
        """Judge a pulse that grows with each thing that the loop begins; 0 while it rests."""
        if pulse != self._pulse or pulse == 0:
            self._pulse, self._since, self._reported = pulse, now, False
            return None
        if self.stalled_s(now) >= self._limit_s:
            return StallVerdict.HUNG
        if self.stalled_s(now) >= self._stall_s and not self._reported:
            self._reported = True
            return StallVerdict.STALLED
        return None

    def stalled_s(self, now: float) -> float:
        """For how long the pulse has been what it is."""
        return now - self._since


def stack_of(thread: int | None) -> str:
    """Where a thread is, innermost call last; empty if it is gone."""
    frame = sys._current_frames().get(thread or 0)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    return "".join(traceback.format_stack(frame)) if frame is not None else ""
