"""Queue and running timeouts of requests."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

from antiphon.wire.errors import DeadlineExceeded, EngineError, Overloaded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from antiphon.model_worker.batching.request import Request
    from antiphon.model_worker.batching.state import EngineLimits

_RETRY_AFTER_S = 1.0


class Timeouts:
    """Queue and running timeouts, by the caller's clock, which never goes back.

    A request has one of them. Once it was started it is no longer subject to the queue timeout:
    should it be retracted, only the running timeout counts. A request that has ended is forgotten
    at once: its prompt may be long, and its timeout hours away. Few wait or run at once, so a
    sorted list serves.
    """

    def __init__(self, limits: EngineLimits) -> None:
        self._queue_s = limits.queue_timeout_s
        self._running_s = limits.running_timeout_s
        self._order: list[tuple[float, int]] = []  # due time and arrival
        self._requests: dict[int, tuple[float, Request]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def next_due(self) -> float | None:
        return self._order[0][0] if self._order else None

    def arrived(self, request: Request) -> None:
        """Start the queue timeout, counted from when the request was first queued anywhere."""
        if self._queue_s is not None:
            self._put(request, request.queued_s + self._queue_s)

    def started(self, request: Request, now: float) -> None:
        """Replace the queue timeout by the running timeout, at the first start of a request."""
        self.ended(request)
        if self._running_s is not None:
            self._put(request, now + self._running_s)

    def ended(self, request: Request) -> None:
        if (found := self._requests.pop(request.arrival, None)) is not None:
            del self._order[bisect_left(self._order, (found[0], request.arrival))]

    def any_due(self, now: float) -> bool:
        return bool(self._order) and now >= self._order[0][0]

    def take_due(self, now: float) -> Iterator[tuple[Request, EngineError]]:
        while self.any_due(now):
            _, arrival = self._order.pop(0)
            _, request = self._requests.pop(arrival)
            if request.started_s is not None:
                yield request, DeadlineExceeded(f"running timeout: {self._running_s:g} s")
            else:
                assert self._queue_s is not None, "a request is due without a queue timeout"
                error = Overloaded.late(timeout_s=self._queue_s, retry_after_s=_RETRY_AFTER_S)
                yield request, error

    def _put(self, request: Request, due_s: float) -> None:
        insort(self._order, (due_s, request.arrival))
        self._requests[request.arrival] = (due_s, request)
