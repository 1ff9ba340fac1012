"""In which order waiting requests are admitted: the lowest place is next."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import TYPE_CHECKING

from antiphon.config.worker import Policy
from antiphon.service.priority import PriorityPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from antiphon.model_worker.batching.request import Request, RequestState
    from antiphon.model_worker.cache.index import Prefix, PrefixNode

TREE_POLICIES = frozenset({Policy.LPM, Policy.DFS_WEIGHT})
"""Those that order by what the prefix index has."""

TREE_WAITING_MAX = 128
"""Beyond this many waiting requests the orders by the tree give way to arrival: looking each
prompt up whenever the tree has changed would cost more than a good order saves."""

QueueKey = tuple[float, float, int]
"""Rank by priority, then what the policy says, then arrival. No two requests have the same."""


class QueueRules(PriorityPolicy, frozen=True, kw_only=True):
    """Who goes first.

    Attributes:
        policy: Orders those of one rank.
        refuse_priority: Whether a priority is refused where it does not count.
    """

    policy: Policy = Policy.FCFS
    refuse_priority: bool = False


class QueueOrder:
    """Gives each request its place, once, when it arrives.

    A place never changes, so that the queue is kept in order instead of being sorted. What depends
    on the tree does change: see `by_tree`.
    """

    def __init__(self, rules: QueueRules) -> None:
        self._rules = rules
        # A fixed seed: an order that is drawn is as good as any, and a run can be repeated.
        self._random = random.Random(0)  # noqa: S311

    def key(self, state: RequestState, arrival: int) -> QueueKey:
        """Where a request stands among the waiting ones."""
        return self._rules.rank(state.priority), self._standing(state), arrival

    def _standing(self, state: RequestState) -> float:
        match self._rules.policy:
            case Policy.LOF:
                return -state.sampling.max_new_tokens
            case Policy.RANDOM:
                return self._random.random()
            case _:
                return 0.0


def order_by_prefix(
    policy: Policy, waiting: Sequence[Request], peek: Callable[[Request], Prefix]
) -> list[Request]:
    """Order requests by what the prefix index has of them. Equals keep their order.

    Longest prefix match: who has most in the cache goes first, before it is evicted. Depth first:
    requests under one node of the tree follow each other, the most wanted subtrees first, so that
    what they share is there once and then never again.
    """
    prefixes = {request.arrival: peek(request) for request in waiting}
    if policy is Policy.LPM:
        return sorted(waiting, key=lambda r: (r.rank, -prefixes[r.arrival].length))
    branches = _Branches([(request, prefixes[request.arrival].node) for request in waiting])
    visited = {request.arrival: index for index, request in enumerate(branches.visit())}
    return sorted(waiting, key=lambda r: (r.rank, visited[r.arrival]))


class _Branches:
    """The part of the tree that has waiting requests under it."""

    def __init__(self, pairs: Sequence[tuple[Request, PrefixNode | None]]) -> None:
        self._here: defaultdict[PrefixNode | None, list[Request]] = defaultdict(list)
        self._weight: defaultdict[PrefixNode | None, int] = defaultdict(int)
        self._children: defaultdict[PrefixNode | None, dict[PrefixNode, None]] = defaultdict(dict)
        for request, node in pairs:
            self._here[node].append(request)
            self._add(node)

    def visit(self) -> Iterator[Request]:
        """Requests in the order of a depth-first walk, the heavier branches first.

        Those that stop at a node come after those below it, which share more.
        """
        stack: list[tuple[PrefixNode | None, bool]] = [(None, False)]
        while stack:
            node, below_done = stack.pop()
            if below_done:
                yield from self._here.get(node, ())
                continue
            stack.append((node, True))
            children = self._children.get(node, {})
            heaviest_first = sorted(children, key=self._weight.__getitem__, reverse=True)
            stack.extend((child, False) for child in reversed(heaviest_first))

    def _add(self, node: PrefixNode | None) -> None:
        while node is not None:
            self._weight[node] += 1
            parent = node.parent
            self._children[parent][node] = None
            node = parent
