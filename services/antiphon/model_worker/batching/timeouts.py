"""Queue and running timeouts of requests."""

from __future__ import annotations

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
    at once: its prompt may be long, and its timeout hours away.
    """

    def __init__(self, limits: EngineLimits) -> None:
        self.next_due: float | None = None
        self._queue_s = limits.queue_timeout_s
        self._running_s = limits.running_timeout_s
        self._due_s: dict[Request, float] = {}

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
        if self._due_s.pop(request, None) == self.next_due:
            self.next_due = min(self._due_s.values(), default=None)

    def any_due(self, now: float) -> bool:
        return self.next_due is not None and now >= self.next_due

    def take_due(self, now: float) -> Iterator[tuple[Request, EngineError]]:
        while self.any_due(now):
            request = min(self._due_s, key=self._due_s.__getitem__)
            self.ended(request)
            if request.started_s is not None:
                yield request, DeadlineExceeded(f"running timeout: {self._running_s:g} s")
            else:
                assert self._queue_s is not None, "a request is due without a queue timeout"
                error = Overloaded.late(timeout_s=self._queue_s, retry_after_s=_RETRY_AFTER_S)
                yield request, error

    def _put(self, request: Request, due_s: float) -> None:
        self._due_s[request] = due_s
        self.next_due = due_s if self.next_due is None else min(self.next_due, due_s)
