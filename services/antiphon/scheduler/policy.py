"""The order of waiting requests of one rank, by the schedule policy: pure, the clock passed in.

A worker applies the same policies to the requests bound to it. The leader's view of caches is
coarser: 64-token blocks that some worker is known to hold, or to hold soon.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

from antiphon.config.worker import Policy
from antiphon.scheduler.block_index import split_digests
from antiphon.wire.digests import DIGEST_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from antiphon.wire.base import Process
    from antiphon.wire.ids import RequestId
    from antiphon.wire.submit import SubmitRequest

CACHE_POLICIES = frozenset({Policy.LPM, Policy.DFS_WEIGHT})
"""Policies that order by the contents of the workers' prefix caches."""

CACHE_WAITING_MAX = 128
"""With more waiting requests the cache policies fall back to arrival, as in SGLang: repeated
lookups of each prompt would cost more than a good order saves."""

REFRESH_S = 0.05
"""How old an order by cache may be. A prompt of 32 Ki tokens takes 512 lookups."""

Key = tuple[tuple[int, int], ...]

STOP = (1, 0)
"""Sorts after every branch."""


class QueuePolicy:
    """Orders the leader's queue within one rank; the queue itself handles rank and fairness.

    Args:
        policy: As configured; `priority` is arrival within one rank.
        overlaps: Counts the leading blocks of a prompt on each worker, by their digests.
    """

    def __init__(self, policy: Policy, overlaps: Callable[[bytes], dict[Process, int]]) -> None:
        self._policy = policy
        self._overlaps = overlaps
        # A fixed seed: any random order is as good, and a simulation is reproducible.
        self._random = random.Random(0)  # noqa: S311
        self._order: dict[RequestId, int] = {}
        self._refreshed_at: float | None = None

    @property
    def by_cache(self) -> bool:
        """Whether the order depends on the caches; see `cache_order`."""
        return self._policy in CACHE_POLICIES

    def static_key(self, submit: SubmitRequest) -> float:
        """A request's fixed sort key within its rank; the lowest is next."""
        match self._policy:
            case Policy.LOF:
                return -submit.sampling.max_new_tokens
            case Policy.RANDOM:
                return self._random.random()
            case _:
                return 0.0

    def cache_order(
        self, waiting: Iterable[tuple[RequestId, bytes]], now: float
    ) -> dict[RequestId, int]:
        """Rank waiting requests by the cache, lowest first; newer requests are missing from it.

        Args:
            waiting: Requests in order of arrival, with the digests of their prompts' blocks.
            now: A result is reused for `REFRESH_S`, however many requests arrive meanwhile.
        """
        if self._refreshed_at is None or now - self._refreshed_at >= REFRESH_S:
            self._refreshed_at = now
            cached = [(name, self._cached(digests)) for name, digests in waiting]
            key = _depth_first(cached) if self._policy is Policy.DFS_WEIGHT else _longest_first
            names = [name for name, _ in sorted(cached, key=key)]
            self._order = {name: index for index, name in enumerate(names)}
        return self._order

    def _cached(self, digests: bytes) -> list[bytes]:
        """The longest prefix of a prompt's blocks that some worker holds."""
        most = max(self._overlaps(digests).values(), default=0)
        return list(split_digests(digests[: most * DIGEST_BYTES]))


def _longest_first(cached: tuple[RequestId, list[bytes]]) -> int:
    return -len(cached[1])


def _depth_first(
    waiting: list[tuple[RequestId, list[bytes]]],
) -> Callable[[tuple[RequestId, list[bytes]]], Key]:
    """Order by depth-first traversal of the blocks, the branches with most requests first.

    A digest names a whole prefix, so the digests of a prompt are its path from the root. Prompts
    that end at a block come after those that continue below it, which share more.
    """
    weights = Counter(digest for _, path in waiting for digest in path)
    first: dict[bytes, int] = {}
    for _, path in waiting:
        for digest in path:
            first.setdefault(digest, len(first))

    def key(cached: tuple[RequestId, list[bytes]]) -> Key:
        branches: list[tuple[int, int]] = []
        weight = 0
        for digest in cached[1]:
            if weights[digest] != weight:  # without a branch, a block adds no information
                weight = weights[digest]
                branches.append((-weight, first[digest]))
        return (*branches, STOP)

    return key
