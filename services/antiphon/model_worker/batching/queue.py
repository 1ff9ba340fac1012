"""The requests that wait for a slot and pages."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from heapq import heappop, heappush
from operator import attrgetter
from typing import TYPE_CHECKING

from antiphon.model_worker.batching.policy import TREE_POLICIES, TREE_WAITING_MAX, by_tree
from antiphon.model_worker.batching.request import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from antiphon.model_worker.batching.policy import Rules
    from antiphon.model_worker.batching.request import Request
    from antiphon.model_worker.cache.index import Prefix

CANDIDATES_MAX = 128
"""How many waiting requests a step looks at. Some may have to be passed over, for they wait for
something else; this many in a row are rare, and looking at thousands in each step is not cheap."""

_place = attrgetter("place")


class WaitingQueue:
    """Keeps waiting requests in the order of the policy, and lets nobody be overtaken for ever."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._requests: list[Request] = []
        self._overtaken = Overtaken(rules.max_overtake_s)

    def __len__(self) -> int:
        return len(self._requests)

    def put(self, request: Request) -> None:
        """Add a new request, or one that was retracted."""
        insort(self._requests, request, key=_place)
        self._overtaken.enter(request)

    def first(self) -> Request | None:
        """The first by its place, if any waits. It stays in the queue."""
        return self._requests[0] if self._requests else None

    def last(self) -> Request | None:
        """The last by its place, if any waits. It stays in the queue."""
        return self._requests[-1] if self._requests else None

    def ahead(self) -> list[Request]:
        """Those whom a step may look at, by their places. They stay in the queue."""
        return self._requests[:CANDIDATES_MAX]

    def candidates(self, now: float, peek: Callable[[Request], Prefix]) -> list[Request]:
        """The next ones, in the order in which they are to be admitted.

        Those who have been overtaken for too long come first from then on, in order of arrival.
        """
        for request in self._overtaken.take_overdue(now):
            self.remove(request)
            request.promote()
            insort(self._requests, request, key=_place)
        policy = self._rules.policy
        if policy not in TREE_POLICIES or len(self._requests) > TREE_WAITING_MAX:
            return self._requests[:CANDIDATES_MAX]
        urgent = [request for request in self._requests if request.urgent]
        return urgent + by_tree(policy, self._requests[len(urgent) :], peek)

    def admit(self, request: Request, now: float) -> None:
        """Take a request out, for it is about to start. It overtakes those who came before it."""
        self.remove(request)
        self._overtaken.overtake(request, now)

    def remove(self, request: Request) -> None:
        """Take a request out: it was admitted, or nobody wants it."""
        index = bisect_left(self._requests, request.place, key=_place)
        assert self._requests[index] is request, "a request left a queue that it was not in"
        del self._requests[index]


class Overtaken:
    """Who waits while somebody who came later was admitted, and since when.

    Each request is looked at once when it is overtaken and once when it leaves, however many wait.
    Entries of requests that wait no more, or again, are passed over: their life has changed.
    """

    def __init__(self, overtake_s_max: float) -> None:
        self._overtake_s_max = overtake_s_max
        self._fresh: list[tuple[int, int, Request]] = []  # a heap by arrival
        self._passed: deque[tuple[float, int, Request]] = deque()  # by time

    def enter(self, request: Request) -> None:
        """A request begins to wait."""
        heappush(self._fresh, (request.arrival, request.life, request))

    def overtake(self, request: Request, now: float) -> None:
        """A request is admitted: all that wait and came before it are overtaken."""
        while self._fresh and self._fresh[0][0] <= request.arrival:
            _, life, passed = heappop(self._fresh)
            if passed is not request and _waits(passed, life):
                self._passed.append((now, life, passed))

    def take_overdue(self, now: float) -> Iterator[Request]:
        """Those who have been overtaken for too long, the longest first, each once."""
        while self._passed:
            since, life, request = self._passed[0]
            waits = _waits(request, life)
            if waits and now - since < self._overtake_s_max:
                return
            self._passed.popleft()
            if waits:
                yield request


def _waits(request: Request, life: int) -> bool:
    return request.phase is Phase.WAITING and request.life == life
