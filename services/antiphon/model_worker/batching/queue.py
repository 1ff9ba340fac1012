"""The requests that wait for a slot and pages."""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from antiphon.model_worker.batching.policy import TREE_POLICIES, TREE_WAITING_MAX, order_by_prefix
from antiphon.model_worker.batching.request import Phase, Request
from antiphon.service.priority import OvertakeTracker

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.model_worker.batching.policy import QueueRules
    from antiphon.model_worker.cache.index import Prefix

CANDIDATES_MAX = 128
"""How many waiting requests a step considers. Some may have to be skipped, because they wait for a
prefix or a grammar; so many in a row are rare, and looking at thousands in each step is slow."""

Ticket = tuple[Request, int]
"""A request, and its generation at the time it was queued."""

_place = attrgetter("place")


class Backlog(NamedTuple):
    """Size of the waiting queue.

    Attributes:
        tokens: Tokens to prefill, outputs of retracted requests included. Some may be cached.
        retracted: Choices that were running before.
    """

    tokens: int = 0
    retracted: int = 0


class WaitingQueue:
    """Waiting requests in the order of the policy, with a limit on how long one is overtaken."""

    def __init__(self, rules: QueueRules) -> None:
        self._rules = rules
        self._requests: list[Request] = []
        self._overtaken = OvertakeTracker[Ticket](rules.max_overtake_s, _waits)

    def __len__(self) -> int:
        return len(self._requests)

    def put(self, request: Request) -> None:
        """Add a new request, or one that was retracted."""
        insort(self._requests, request, key=_place)
        self._overtaken.enter(request.arrival, (request, request.life))

    def backlog(self) -> Backlog:
        """Measure the queue."""
        return Backlog(
            tokens=sum(request.length for request in self._requests),
            retracted=sum(request.started_s is not None for request in self._requests),
        )

    def first(self) -> Request | None:
        """The first request by queue key, if any waits. It stays in the queue."""
        return self._requests[0] if self._requests else None

    def last(self) -> Request | None:
        """The last request by queue key, if any waits. It stays in the queue."""
        return self._requests[-1] if self._requests else None

    def head(self) -> list[Request]:
        """The requests that a step may consider, by queue key. They stay in the queue."""
        return self._requests[:CANDIDATES_MAX]

    def candidates(self, now: float, peek: Callable[[Request], Prefix]) -> list[Request]:
        """The next requests, in the order in which they are to be admitted.

        Requests that were overtaken for too long come first from then on, in order of arrival.
        """
        for request, _ in self._overtaken.pop_overdue(now):
            self.remove(request)
            request.promote()
            insort(self._requests, request, key=_place)
        policy = self._rules.policy
        if policy not in TREE_POLICIES or len(self._requests) > TREE_WAITING_MAX:
            return self._requests[:CANDIDATES_MAX]
        urgent = [request for request in self._requests if request.urgent]
        return urgent + order_by_prefix(policy, self._requests[len(urgent) :], peek)

    def admit(self, request: Request, now: float) -> None:
        """Remove a request that is about to start. It overtakes earlier arrivals."""
        self.remove(request)
        if request.overtaken_s is not None:
            # Should it be retracted and overtaken again, this wait still counts.
            request.overtaken_before_s += now - request.overtaken_s
            request.overtaken_s = None
        for overtaken, _ in self._overtaken.overtake(request.arrival, now, _before_s):
            overtaken.overtaken_s = now

    def remove(self, request: Request) -> None:
        """Remove a request that was admitted or dropped."""
        index = bisect_left(self._requests, request.place, key=_place)
        assert self._requests[index] is request, "a request was removed that was not queued"
        del self._requests[index]

    def discard(self, request: Request) -> None:
        """Remove a request if it is queued: a failed one may be neither queued nor running."""
        index = bisect_left(self._requests, request.place, key=_place)
        if index < len(self._requests) and self._requests[index] is request:
            del self._requests[index]


def _waits(ticket: Ticket) -> bool:
    request, generation = ticket
    return request.phase is Phase.WAITING and request.life == generation


def _before_s(ticket: Ticket) -> float:
    return ticket[0].overtaken_before_s
