"""The watchdog of the batching loop: a stall is logged while it lasts."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, assert_never

from antiphon.model_worker.observability.flight_recorder import summary
from antiphon.model_worker.observability.stall_detector import LoopHung, StallVerdict, stack_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.model_worker.batching.loop import BatchingLoop
    from antiphon.model_worker.observability.stall_detector import StallDetector

log = logging.getLogger(__name__)


class LoopWatchdog:
    """Watches the batching loop from the event loop.

    Args:
        loop: The loop to watch.
        watchdog: The detector with its time limits.
        stalled: Called when the loop stalls.
    """

    def __init__(
        self, loop: BatchingLoop, watchdog: StallDetector, stalled: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._watchdog = watchdog
        self._stalled = stalled

    def check(self, now: float) -> None:
        """Log the stack and the plan of a loop that stalls.

        Raises:
            LoopHung: It has stalled for so long that it will not recover.
        """
        verdict = self._watchdog.observe(self._loop.progress_count, now)
        if verdict is None:
            return
        stalled_s = self._watchdog.stalled_s(now)
        records = self._loop.recorder.records()
        log.error(
            "batching loop stalled",
            extra={
                "seconds": round(stalled_s, 1),
                "stack": "\n" + stack_of(self._loop.thread),
                **(summary(records[-1].plan) if records else {}),
            },
        )
        match verdict:
            case StallVerdict.STALLED:
                self._stalled()
            case StallVerdict.HUNG:
                raise LoopHung(f"the batching loop has been stalled for {stalled_s:.0f} s")
            case _:
                assert_never(verdict)
