"""The waiting queue: in which order requests are admitted, and how long one may be overtaken."""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from operator import attrgetter
from typing import TYPE_CHECKING

from antiphon.config.worker import Policy
from antiphon.service.priority import OvertakeTracker, PriorityPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from antiphon.model_worker.batching.request import Request
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

Ticket = tuple[int, int]
"""The arrival of a request, and how often it had been retracted when it was queued."""

_place = attrgetter("place")


class QueueRules(PriorityPolicy, frozen=True, kw_only=True):
    policy: Policy = Policy.FCFS
    refuse_priority: bool = False


class WaitingQueue:
    """Waiting requests by queue key, with a limit on how long one is overtaken."""

    def __init__(self, rules: QueueRules) -> None:
        self._rules = rules
        self._requests: list[Request] = []
        self._tickets: dict[Ticket, Request] = {}  # nothing overtakes promoted ones
        self._overtaken = OvertakeTracker[Ticket](rules.max_overtake_s, self._tickets.__contains__)
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
        ticket = (request.arrival, request.retractions)
        self._tickets[ticket] = request
        self._overtaken.enter(request.arrival, ticket)

    def backlog(self) -> tuple[int, int]:
        """Tokens to prefill, of which some may be cached, and how many requests were retracted."""
        tokens = sum(request.length for request in self._requests)
        return tokens, sum(request.started_s is not None for request in self._requests)

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
        for ticket in self._overtaken.pop_overdue(now):
            request = self._tickets[ticket]
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
        for ticket in self._overtaken.overtake(request.arrival, now, self._before_s):
            self._tickets[ticket].overtaken_s = now

    def remove(self, request: Request) -> None:
        queued = self.discard(request)
        assert queued, "a request was removed that was not queued"

    def discard(self, request: Request) -> bool:
        """Remove a request if it is queued: a failed one may be neither queued nor running."""
        index = bisect_left(self._requests, request.place, key=_place)
        queued = index < len(self._requests) and self._requests[index] is request
        if queued:
            del self._requests[index]
            self._tickets.pop((request.arrival, request.retractions), None)
        return queued

    def _before_s(self, ticket: Ticket) -> float:
        return self._tickets[ticket].overtaken_before_s


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
    pairs = [(request, prefixes[request.arrival].node) for request in waiting]
    visited = {request.arrival: index for index, request in enumerate(_depth_first(pairs))}
    return sorted(waiting, key=lambda r: (r.rank, visited[r.arrival]))


def _depth_first(pairs: Iterable[tuple[Request, RadixNode | None]]) -> Iterator[Request]:
    """Requests in the order of a depth-first walk of their nodes, the heavier branches first.

    Those that stop at a node come after those below it, which share more.
    """
    here: defaultdict[RadixNode | None, list[Request]] = defaultdict(list)
    weight: Counter[RadixNode] = Counter()
    children: defaultdict[RadixNode | None, dict[RadixNode, None]] = defaultdict(dict)
    for request, last in pairs:
        here[last].append(request)
        node = last
        while node is not None:
            weight[node] += 1
            children[node.parent][node] = None
            node = node.parent
    stack: list[tuple[RadixNode | None, bool]] = [(None, False)]
    while stack:
        node, below_done = stack.pop()
        if below_done:
            yield from here[node]
            continue
        stack.append((node, True))
        heaviest_first = sorted(children[node], key=weight.__getitem__, reverse=True)
        stack.extend((child, False) for child in reversed(heaviest_first))
