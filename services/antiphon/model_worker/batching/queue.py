"""The requests that wait for a slot and pages."""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING

from antiphon.model_worker.batching.policy import fcfs

if TYPE_CHECKING:
    from antiphon.model_worker.batching.request import Request


class WaitingQueue:
    """Keeps waiting requests in the order of the policy. Its bound is the mailbox's."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def put(self, request: Request) -> None:
        """Add a new request, or one that was retracted."""
        insort(self._requests, request, key=fcfs)

    def first(self) -> Request | None:
        """The request that is next, if any waits. It stays in the queue."""
        return self._requests[0] if self._requests else None

    def remove(self, request: Request) -> None:
        """Take a request out: it was admitted, or nobody wants it."""
        self._requests.remove(request)
