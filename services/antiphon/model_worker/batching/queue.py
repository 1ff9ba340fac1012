"""The requests that wait for a slot and pages, and the order in which they are admitted."""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections import defaultdict
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from antiphon.config.worker import Policy
from antiphon.model_worker.batching.request import Request
from antiphon.model_worker.batching.state import Phase
from antiphon.service.priority import OvertakeTracker, PriorityPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from antiphon.model_worker.batching.state import QueueKey, RequestState
    from antiphon.model_worker.cache.radix import Prefix
    from antiphon.model_worker.cache.tree import RadixNode

TREE_POLICIES = frozenset({Policy.LPM, Policy.DFS_WEIGHT})
"""Policies that order by the prefix cache."""

TREE_WAITING_MAX = 128
"""Beyond this many waiting requests the tree policies fall back to arrival: matching each prompt
whenever the tree has changed would cost more than a good order saves."""

CANDIDATES_MAX = 128
"""How many waiting requests a step considers. Some may have to be skipped, because they wait for a
prefix or a grammar; so many in a row are rare, and looking at thousands in each step is slow."""

Ticket = tuple[Request, int]
"""A request, and its generation at the time it was queued."""

_place = attrgetter("place")


class QueueRules(PriorityPolicy, frozen=True, kw_only=True):
    policy: Policy = Policy.FCFS
    refuse_priority: bool = False


class Backlog(NamedTuple):
    """Size of the waiting queue."""

    tokens: int = 0  # to prefill, outputs of retracted requests included; some may be cached
    retracted: int = 0


class WaitingQueue:
    """Waiting requests by queue key, with a limit on how long one is overtaken."""

    def __init__(self, rules: QueueRules) -> None:
        self._rules = rules
        self._requests: list[Request] = []
        self._overtaken = OvertakeTracker[Ticket](rules.max_overtake_s, _waits)
        # A fixed seed: any random order is as good, and a run can be repeated.
        self._random = random.Random(0)  # noqa: S311

    def __len__(self) -> int:
        return len(self._requests)

    def key(self, state: RequestState, arrival: int) -> QueueKey:
        """The queue key of a new request. It never changes, so that the queue stays sorted."""
        match self._rules.policy:
            case Policy.LOF:
                key = -state.sampling.max_new_tokens
            case Policy.RANDOM:
                key = self._random.random()
            case _:
                key = 0.0
        return self._rules.rank(state.priority), key, arrival

    def put(self, request: Request) -> None:
        insort(self._requests, request, key=_place)
        self._overtaken.enter(request.arrival, (request, request.life))

    def backlog(self) -> Backlog:
        return Backlog(
            tokens=sum(request.length for request in self._requests),
            retracted=sum(request.started_s is not None for request in self._requests),
        )

    def first(self) -> Request | None:
        return self._requests[0] if self._requests else None

    def last(self) -> Request | None:
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
        queued = self.discard(request)
        assert queued, "a request was removed that was not queued"

    def discard(self, request: Request) -> bool:
        """Remove a request if it is queued: a failed one may be neither queued nor running."""
        index = bisect_left(self._requests, request.place, key=_place)
        queued = index < len(self._requests) and self._requests[index] is request
        if queued:
            del self._requests[index]
        return queued


def _waits(ticket: Ticket) -> bool:
    request, generation = ticket
    return request.phase is Phase.WAITING and request.life == generation


def _before_s(ticket: Ticket) -> float:
    return ticket[0].overtaken_before_s


def order_by_prefix(
    policy: Policy, waiting: Sequence[Request], peek: Callable[[Request], Prefix]
) -> list[Request]:
    """Order requests by their cached prefixes. Equals keep their order.

    Longest prefix match: the longest cached prefix goes first, before it is evicted. Depth first:
    requests under one node of the tree follow each other, the largest subtrees first, so that a
    common prefix is used by all of them before it is evicted.
    """
    prefixes = {request.arrival: peek(request) for request in waiting}
    if policy is Policy.LPM:
        return sorted(waiting, key=lambda r: (r.rank, -prefixes[r.arrival].length))
    branches = _Branches([(request, prefixes[request.arrival].node) for request in waiting])
    visited = {request.arrival: index for index, request in enumerate(branches.visit())}
    return sorted(waiting, key=lambda r: (r.rank, visited[r.arrival]))


class _Branches:
    def __init__(self, pairs: Sequence[tuple[Request, RadixNode | None]]) -> None:
        self._here: defaultdict[RadixNode | None, list[Request]] = defaultdict(list)
        self._weight: defaultdict[RadixNode | None, int] = defaultdict(int)
        self._children: defaultdict[RadixNode | None, dict[RadixNode, None]] = defaultdict(dict)
        for request, node in pairs:
            self._here[node].append(request)
            self._add(node)

    def visit(self) -> Iterator[Request]:
        """Requests in the order of a depth-first walk, the heavier branches first.

        Those that stop at a node come after those below it, which share more.
        """
        stack: list[tuple[RadixNode | None, bool]] = [(None, False)]
        while stack:
            node, below_done = stack.pop()
            if below_done:
                yield from self._here.get(node, ())
                continue
            stack.append((node, True))
            children = self._children.get(node, {})
            heaviest_first = sorted(children, key=self._weight.__getitem__, reverse=True)
            stack.extend((child, False) for child in reversed(heaviest_first))

    def _add(self, node: RadixNode | None) -> None:
        while node is not None:
            self._weight[node] += 1
            parent = node.parent
            self._children[parent][node] = None
            node = parent
