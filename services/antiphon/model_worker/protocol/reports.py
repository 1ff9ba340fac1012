"""The queue of step reports from the batching loop's thread to the event loop's."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.model_worker.batching.loop import StepReport

REPORTS_MAX = 64
"""Reports that may be queued before the batching loop waits."""


@dataclass(kw_only=True)
class ReportQueue:
    """A bounded queue between two threads.

    `take` processes each report in the event loop's thread; `failed` ends with its exception. The
    batching loop waits at most `wait_s` for an event loop that is far behind.
    """

    take: Callable[[StepReport], None]
    wait_s: float

    def __post_init__(self) -> None:
        self._event_loop = asyncio.get_running_loop()
        self._free = threading.Semaphore(REPORTS_MAX)
        self.failed: asyncio.Future[None] = self._event_loop.create_future()

    def put(self, report: StepReport) -> None:
        """Queue a report, in the batching loop's thread; wait if the event loop is far behind.

        A `TimeoutError` ends the process, so that its supervisor starts another: the event loop
        hangs, and heartbeats with it, so that peers have considered it dead long before.
        """
        if not self._free.acquire(timeout=self.wait_s):
            raise TimeoutError(
                f"the event loop processed none of {REPORTS_MAX} step reports in {self.wait_s:g} s"
            )
        self._event_loop.call_soon_threadsafe(self._turn, report)

    def _turn(self, report: StepReport) -> None:
        self._free.release()
        try:
            self.take(report)
        except Exception as error:  # noqa: BLE001  # raised where `failed` is awaited
            if not self.failed.done():
                self.failed.set_exception(error)
