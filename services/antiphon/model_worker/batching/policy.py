"""The order in which waiting requests are admitted: the lowest queue key is next."""

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
"""Policies that order by the prefix cache."""

TREE_WAITING_MAX = 128
"""Beyond this many waiting requests the tree policies fall back to arrival: matching each prompt
whenever the tree has changed would cost more than a good order saves."""

QueueKey = tuple[float, float, int]
"""Rank by priority, then the key of the policy, then arrival. It is unique."""


class QueueRules(PriorityPolicy, frozen=True, kw_only=True):
    """Queue policy and priorities.

    Attributes:
        policy: Orders requests of the same rank.
        refuse_priority: Whether a priority is rejected where priority scheduling is disabled.
    """

    policy: Policy = Policy.FCFS
    refuse_priority: bool = False


class QueueOrder:
    """Gives each request its queue key, once, when it arrives.

    A key never changes, so that the queue stays sorted. The order by prefix does change: see
    `order_by_prefix`.
    """

    def __init__(self, rules: QueueRules) -> None:
        self._rules = rules
        # A fixed seed: any random order is as good, and a run can be repeated.
        self._random = random.Random(0)  # noqa: S311

    def key(self, state: RequestState, arrival: int) -> QueueKey:
        """The queue key of a request."""
        return self._rules.rank(state.priority), self._policy_key(state), arrival

    def _policy_key(self, state: RequestState) -> float:
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
    """The part of the radix tree that has waiting requests under it."""

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
