"""Who has waited, or run, for too long."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

from antiphon.model_worker.batching.request import Phase
from antiphon.wire.errors import DeadlineExceeded, EngineError, Overloaded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from antiphon.model_worker.batching.admission import Limits
    from antiphon.model_worker.batching.request import Request

_RETRY_AFTER_S = 1.0


class Timeouts:
    """Ends that come by the clock, which is the caller's.

    A request that was started once has left the queue for good: should it be retracted, it runs
    against its running time. Entries of what has ended meanwhile are passed over.
    """

    def __init__(self, limits: Limits) -> None:
        self._queue_s = limits.queue_timeout_s
        self._running_s = limits.running_timeout_s
        self._due: list[tuple[float, int, bool, Request]] = []  # a heap

    def arrived(self, request: Request) -> None:
        """A request begins to wait."""
        if self._queue_s is not None:
            due_s = request.arrived_s + self._queue_s
            heappush(self._due, (due_s, request.arrival, False, request))

    def started(self, request: Request, now: float) -> None:
        """A request runs, for the first time."""
        if self._running_s is not None:
            heappush(self._due, (now + self._running_s, request.arrival, True, request))

    def take_due(self, now: float) -> Iterator[tuple[Request, EngineError]]:
        """Those whose time is over, with the reason, each once."""
        while self._due and self._due[0][0] <= now:
            _, _, running, request = heappop(self._due)
            if request.phase is Phase.ENDED:
                continue
            if running:
                yield request, DeadlineExceeded(f"running timeout: {self._running_s:g} s")
            elif request.started_s is None:
                message = f"queue timeout: no place for it within {self._queue_s:g} s"
                yield request, Overloaded(message, retry_after_s=_RETRY_AFTER_S)
