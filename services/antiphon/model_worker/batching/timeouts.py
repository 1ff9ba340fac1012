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

    A request that was started once is no longer subject to the queue timeout: should it be
    retracted, only the running timeout counts. A request that has ended is forgotten at once: its
    prompt may be long, and its timeout hours away.
    """

    def __init__(self, limits: EngineLimits) -> None:
        self._queue_s = limits.queue_timeout_s
        self._running_s = limits.running_timeout_s
        self._limited = self._queue_s is not None or self._running_s is not None
        self._waiting = _Due(self._queue_s)
        self._running = _Due(self._running_s)

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    @property
    def next_due(self) -> float | None:
        dues = (self._waiting.next_due, self._running.next_due)
        return min((due for due in dues if due is not None), default=None)

    def arrived(self, request: Request) -> None:
        """Start the queue timeout, counted from when the request was first queued anywhere."""
        self._waiting.put(request, request.queued_s)

    def started(self, request: Request, now: float) -> None:
        """Replace the queue timeout by the running timeout, at the first start of a request."""
        self._waiting.forget(request)
        self._running.put(request, now)

    def ended(self, request: Request) -> None:
        self._waiting.forget(request)
        self._running.forget(request)

    def any_due(self, now: float) -> bool:
        return self._limited and (self._running.due(now) or self._waiting.due(now))

    def take_due(self, now: float) -> Iterator[tuple[Request, EngineError]]:
        """Requests whose timeout has expired, with the error, each once."""
        for request in self._running.take(now):
            yield request, DeadlineExceeded(f"running timeout: {self._running_s:g} s")
        for request in self._waiting.take(now):
            assert self._queue_s is not None, "a request is due without a queue timeout"
            yield request, Overloaded.late(timeout_s=self._queue_s, retry_after_s=_RETRY_AFTER_S)


class _Due:
    """Requests with the same timeout each: they expire in the order of their start times.

    Requests may arrive out of that order, after waiting elsewhere. Few wait or run at once, so a
    sorted list serves.
    """

    def __init__(self, time_s: float | None) -> None:
        self._time_s = time_s
        self._order: list[tuple[float, int]] = []  # start time and arrival
        self._since: dict[int, tuple[float, Request]] = {}

    def __len__(self) -> int:
        return len(self._since)

    def put(self, request: Request, since: float) -> None:
        if self._time_s is not None:
            insort(self._order, (since, request.arrival))
            self._since[request.arrival] = (since, request)

    @property
    def next_due(self) -> float | None:
        return self._order[0][0] + self._time_s if self._order and self._time_s else None

    def due(self, now: float) -> bool:
        if not self._order or self._time_s is None:
            return False
        return now >= self._order[0][0] + self._time_s

    def forget(self, request: Request) -> None:
        found = self._since.pop(request.arrival, None)
        if found is not None:
            del self._order[bisect_left(self._order, (found[0], request.arrival))]

    def take(self, now: float) -> Iterator[Request]:
        while self.due(now):
            arrival = self._order[0][1]
            del self._order[0]
            yield self._since.pop(arrival)[1]
