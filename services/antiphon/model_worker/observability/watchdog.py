"""The watchdog of the batching loop: a stall is logged while it lasts."""

from __future__ import annotations

import logging
import sys
import traceback
from typing import TYPE_CHECKING, Any

from antiphon.model_worker.observability.flight_recorder import summary

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.config.worker import BatchingConfig
    from antiphon.model_worker.batching.loop import BatchingLoop

log = logging.getLogger(__name__)


class LoopHung(Exception):
    """The loop will not recover: the process has to end, so that another one takes its place."""


class LoopWatchdog:
    """Checks the loop's progress counter several times a second, and reports each stall once.

    The loop itself pays one assignment a step for it: time is measured here.
    """

    def __init__(
        self, loop: BatchingLoop[Any], config: BatchingConfig, stalled: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._config = config
        self._stalled = stalled
        self._progress_count = -1
        self._since = 0.0
        self._reported = False

    def check(self, now: float) -> None:
        """Log the stacks of a loop that stalls and of its forward pass, and the plan it waits for.

        A stall is logged once: with a slow disk or a busy machine the loop may still recover.

        Raises:
            LoopHung: It has stalled for so long that it will not recover.
        """
        progress_count = self._loop.progress_count
        if progress_count != self._progress_count or progress_count == 0:
            self._progress_count, self._since, self._reported = progress_count, now, False
            return
        stalled_s = now - self._since
        hung = stalled_s >= self._config.stall_limit_s
        if not hung and (self._reported or stalled_s < self._config.stall_s):
            return
        self._reported = True
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
        if hung:
            raise LoopHung(f"the batching loop has been stalled for {stalled_s:.0f} s")
        self._stalled()


def stack_of(thread: int | None) -> str:
    """The stack of a thread, innermost call last; empty if the thread has ended."""
    frame = sys._current_frames().get(thread or 0)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    return "".join(traceback.format_stack(frame)) if frame is not None else ""
