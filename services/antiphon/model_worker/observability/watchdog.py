"""The watchdog of the batching loop: a stall is logged while it lasts."""

from __future__ import annotations

import logging
import sys
import traceback
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from antiphon.model_worker.observability.flight_recorder import summary

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.config.worker import BatchingConfig
    from antiphon.model_worker.batching.loop import BatchingLoop

log = logging.getLogger(__name__)


class StallVerdict(Enum):
    """The state of a loop without progress."""

    STALLED = "stalled"
    """Reported once; with a slow disk or a busy machine it may still recover."""
    HUNG = "hung"
    """It will not recover: the process has to end, so that another one takes its place."""


class LoopHung(Exception):
    pass


@dataclass(kw_only=True)
class StallDetector:
    """Compares the loop's progress counter several times a second, and detects stalls.

    The loop itself pays one assignment a step for it: time is measured here.
    """

    stall_s: float
    limit_s: float
    _progress_count: int = -1
    _since: float = 0.0
    _reported: bool = False

    def observe(self, progress_count: int, now: float) -> StallVerdict | None:
        """Check a counter that grows whenever the loop begins something; 0 while it is idle."""
        if progress_count != self._progress_count or progress_count == 0:
            self._progress_count, self._since, self._reported = progress_count, now, False
            return None
        if self.stalled_s(now) >= self.limit_s:
            return StallVerdict.HUNG
        if self.stalled_s(now) >= self.stall_s and not self._reported:
            self._reported = True
            return StallVerdict.STALLED
        return None

    def stalled_s(self, now: float) -> float:
        return now - self._since


def stack_of(thread: int | None) -> str:
    """The stack of a thread, innermost call last; empty if the thread has ended."""
    frame = sys._current_frames().get(thread or 0)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    return "".join(traceback.format_stack(frame)) if frame is not None else ""


class LoopWatchdog:
    def __init__(
        self, loop: BatchingLoop[Any], config: BatchingConfig, stalled: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._detector = StallDetector(stall_s=config.stall_s, limit_s=config.stall_limit_s)
        self._stalled = stalled

    def check(self, now: float) -> None:
        """Log the stacks of a loop that stalls and of its forward pass, and the plan it waits for.

        Raises:
            LoopHung: It has stalled for so long that it will not recover.
        """
        if (verdict := self._detector.observe(self._loop.progress_count, now)) is None:
            return
        stalled_s = self._detector.stalled_s(now)
        reading = self._loop.reading
        log.error(
            "batching loop stalled",
            extra={
                "seconds": round(stalled_s, 1),
                "stack": "\n" + stack_of(self._loop.thread),
                "forward_stack": "\n" + stack_of(self._loop.forward_thread),
                **({} if reading is None else summary(reading.plan)),
            },
        )
        if verdict is StallVerdict.HUNG:
            raise LoopHung(f"the batching loop has been stalled for {stalled_s:.0f} s")
        self._stalled()
