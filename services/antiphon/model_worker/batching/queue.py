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
"""How many waiting requests a step looks at. Some may have to be passed over, for they wait for
something else; this many in a row are rare, and looking at thousands in each step is not cheap."""

Ticket = tuple[Request, int]
"""A request, and which of its lives it waits in."""

_place = attrgetter("place")


class Backlog(NamedTuple):
    """What waits.

    Attributes:
        tokens: Of all prompts, and of answers that were retracted. The cache may have some.
        retracted: Choices that had begun.
    """

    tokens: int = 0
    retracted: int = 0


class WaitingQueue:
    """Keeps waiting requests in the order of the policy, and lets nobody be overtaken for ever."""

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
        """Count what waits."""
        return Backlog(
            tokens=sum(request.length for request in self._requests),
            retracted=sum(request.started_s is not None for request in self._requests),
        )

    def first(self) -> Request | None:
        """The first by its place, if any waits. It stays in the queue."""
        return self._requests[0] if self._requests else None

    def last(self) -> Request | None:
        """The last by its place, if any waits. It stays in the queue."""
        return self._requests[-1] if self._requests else None

    def head(self) -> list[Request]:
        """Those whom a step may look at, by their places. They stay in the queue."""
        return self._requests[:CANDIDATES_MAX]

    def candidates(self, now: float, peek: Callable[[Request], Prefix]) -> list[Request]:
        """The next ones, in the order in which they are to be admitted.

        Those who have been overtaken for too long come first from then on, in order of arrival.
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
        """Take a request out, for it is about to start. It overtakes those who came before it."""
        self.remove(request)
        if request.overtaken_s is not None:
            # It may be retracted, and is not overtaken anew then: this wait counts on.
            request.overtaken_before_s += now - request.overtaken_s
            request.overtaken_s = None
        for overtaken, _ in self._overtaken.overtake(request.arrival, now, _before_s):
            overtaken.overtaken_s = now

    def remove(self, request: Request) -> None:
        """Take a request out: it was admitted, or nobody wants it."""
        index = bisect_left(self._requests, request.place, key=_place)
        assert self._requests[index] is request, "a request left a queue that it was not in"
        del self._requests[index]

    def discard(self, request: Request) -> None:
        """Take a request out, if it is in: one that failed may be neither here nor running."""
        index = bisect_left(self._requests, request.place, key=_place)
        if index < len(self._requests) and self._requests[index] is request:
            del self._requests[index]


def _waits(ticket: Ticket) -> bool:
    request, life = ticket
    return request.phase is Phase.WAITING and request.life == life


def _before_s(ticket: Ticket) -> float:
    return ticket[0].overtaken_before_s
