"""Reports of steps, on their way from the batching loop's thread to the event loop's."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from antiphon.model_worker.batching.loop import StepReport

REPORTS_MAX = 64
"""Steps that the batching loop may be ahead of the event loop before it waits."""


class ReportQueue:
    """A queue between two threads that nobody need pass through whose report is steady.

    Attributes:
        failed: Ends with the exception of a turn that could not take reports in.
    """

    def __init__(
        self,
        *,
        relay: Callable[[StepReport], bool],
        take: Callable[[Iterator[tuple[StepReport, bool]]], None],
        wait_s: float,
    ) -> None:
        """In the event loop's thread.

        Args:
            relay: Does all that a steady report asks for, in the thread of the batching loop. False
                if that is not to be had now.
            take: Takes in reports, each with whether it is the last; in the event loop's thread.
            wait_s: How long the batching loop waits for an event loop that is far behind.
        """
        self._wait_s = wait_s
        self._event_loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = self._event_loop.create_future()
        self._relay = relay
        self._take = take
        self._waiting: deque[StepReport] = deque()
        self._taken = threading.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def deliver(self, report: StepReport) -> None:
        """In the batching loop's thread. If the event loop is far behind, wait for it.

        Raises:
            TimeoutError: It took in no report for so long that it hangs. Peers have taken this
                process for dead long before, since heartbeats stand still with it; the exception
                ends it, so that its supervisor starts another.
        """
        if report.steady and self._relay(report):
            return
        if len(self) >= REPORTS_MAX:
            self._wait()
        self._waiting.append(report)
        self._event_loop.call_soon_threadsafe(self._turn)

    def _wait(self) -> None:
        until = time.monotonic() + self._wait_s
        while len(self) >= REPORTS_MAX:
            # Cleared before the second look, or what is taken in between would wake no thread.
            self._taken.clear()
            left_s = until - time.monotonic()
            if len(self) >= REPORTS_MAX and not self._taken.wait(max(0.0, left_s)) and left_s <= 0:
                message = f"the event loop took in no report of {REPORTS_MAX} in {self._wait_s:g} s"
                raise TimeoutError(message)

    def _turn(self) -> None:
        """One turn of the event loop for all that is there: a task would take another one."""
        try:
            self._take(self._all())
        except Exception as error:  # noqa: BLE001  # raised by whoever waits for `failed`
            if not self.failed.done():
                self.failed.set_exception(error)

    def _all(self) -> Iterator[tuple[StepReport, bool]]:
        """What is there. What comes meanwhile has its own turn."""
        for more in reversed(range(len(self))):
            report = self._waiting.popleft()
            if len(self) >= REPORTS_MAX - 1:  # or nobody can be waiting
                self._taken.set()
            yield report, not more
