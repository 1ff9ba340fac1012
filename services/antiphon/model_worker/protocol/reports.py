"""The queue of step reports from the batching loop's thread to the event loop's."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from antiphon.model_worker.batching.loop import StepReport

REPORTS_MAX = 64
"""Steps that the batching loop may be ahead of the event loop before it waits."""


@dataclass(kw_only=True)
class ReportQueue:
    """A queue between two threads, which reports with only tokens may bypass.

    `relay` processes such a report in the thread of the batching loop, or returns False if that is
    not possible now. `take` processes reports in the event loop's thread, each with whether it is
    the last; `failed` ends with its exception. The batching loop waits at most `wait_s` for an
    event loop that is far behind.
    """

    relay: Callable[[StepReport], bool]
    take: Callable[[Iterator[tuple[StepReport, bool]]], None]
    wait_s: float

    def __post_init__(self) -> None:
        self._event_loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = self._event_loop.create_future()
        self._waiting: deque[StepReport] = deque()
        self._taken = threading.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def deliver(self, report: StepReport) -> None:
        """Queue a report, in the batching loop's thread; wait if the event loop is far behind.

        A `TimeoutError` ends the process, so that its supervisor starts another: the event loop
        hangs, and heartbeats with it, so that peers have considered it dead long before.
        """
        if report.steady and self.relay(report):
            return
        if len(self) >= REPORTS_MAX:
            self._wait()
        self._waiting.append(report)
        self._event_loop.call_soon_threadsafe(self._turn)

    def _wait(self) -> None:
        until = time.monotonic() + self.wait_s
        while len(self) >= REPORTS_MAX:
            # Cleared before the second check, or a report taken in between would wake no thread.
            self._taken.clear()
            left_s = until - time.monotonic()
            if len(self) >= REPORTS_MAX and not self._taken.wait(max(0.0, left_s)) and left_s <= 0:
                raise TimeoutError(
                    f"the event loop processed none of {REPORTS_MAX} step reports in"
                    f" {self.wait_s:g} s"
                )

    def _turn(self) -> None:
        """Process all queued reports in one turn of the event loop: a task would take another."""
        try:
            self.take(self._all())
        except Exception as error:  # noqa: BLE001  # raised where `failed` is awaited
            if not self.failed.done():
                self.failed.set_exception(error)

    def _all(self) -> Iterator[tuple[StepReport, bool]]:
        """The reports queued now. Later ones have their own turn."""
        for more in reversed(range(len(self))):
            report = self._waiting.popleft()
            if len(self) >= REPORTS_MAX - 1:  # else the batching loop cannot be waiting
                self._taken.set()
            yield report, not more
