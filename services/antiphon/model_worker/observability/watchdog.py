"""The batching loop's pulse: what it hangs on is told while it does."""

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
    """Watches the loop from the event loop's side.

    Args:
        loop: The one that may stand still.
        watchdog: How long it may.
        stalled: Called when it does.
    """

    def __init__(
        self, loop: BatchingLoop, watchdog: StallDetector, stalled: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._watchdog = watchdog
        self._stalled = stalled

    def check(self, now: float) -> None:
        """Say what the loop hangs on.

        Raises:
            Hung: It has for so long that it will not go on.
        """
        verdict = self._watchdog.observe(self._loop.progress_count, now)
        if verdict is None:
            return
        stands_s = self._watchdog.stalled_s(now)
        records = self._loop.recorder.records()
        log.error(
            "batching stands still",
            extra={
                "seconds": round(stands_s, 1),
                "stack": "\n" + stack_of(self._loop.thread),
                **(summary(records[-1].plan) if records else {}),
            },
        )
        match verdict:
            case StallVerdict.STALLED:
                self._stalled()
            case StallVerdict.HUNG:
                raise LoopHung(f"the batching loop stands still since {stands_s:.0f} s")
            case _:
                assert_never(verdict)
