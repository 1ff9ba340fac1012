"""The order of waiting requests of one rank, by the schedule policy: pure, the clock passed in.

A worker applies the same policies to what is bound to it. The leader's view of caches is coarser:
blocks of 64 tokens that some worker is known to hold, or to hold soon.
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
"""Those that order by what the workers' caches hold."""

CACHE_WAITING_MAX = 128
"""With more waiting requests the orders by cache give way to arrival, as in SGLang: looking each
prompt up again and again would cost more than a good order saves."""

REFRESH_S = 0.05
"""How old an order by cache may be. A prompt of 32 Ki tokens takes 512 look-ups."""

Key = tuple[tuple[int, int], ...]

STOP = (1, 0)
"""Comes after every branch."""


class QueuePolicy:
    """Orders the leader's queue within one rank; rank and fairness are the queue's own.

    Args:
        policy: As configured; `priority` is arrival within one rank.
        overlaps: How many of a prompt's first blocks each worker holds, by its digests.
    """

    def __init__(self, policy: Policy, overlaps: Callable[[bytes], dict[Process, int]]) -> None:
        self._policy = policy
        self._overlaps = overlaps
        # A fixed seed: any drawn order is as good, and a simulation repeats itself.
        self._random = random.Random(0)  # noqa: S311
        self._order: dict[RequestId, int] = {}
        self._refreshed_at: float | None = None

    @property
    def by_cache(self) -> bool:
        """Whether the order changes with what the caches hold; see `order`."""
        return self._policy in CACHE_POLICIES

    def static_key(self, submit: SubmitRequest) -> float:
        """Where a request stands among those of its rank: drawn once, the lowest is next."""
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
        """Number waiting requests by the cache, the lowest is next; newer ones are not in it.

        Args:
            waiting: Requests in order of arrival, with the digests of their prompts' blocks.
            now: A number holds for `REFRESH_S`, however many requests come meanwhile.
        """
        if self._refreshed_at is None or now - self._refreshed_at >= REFRESH_S:
            self._refreshed_at = now
            cached = [(name, self._cached(digests)) for name, digests in waiting]
            key = _depth_first(cached) if self._policy is Policy.DFS_WEIGHT else _longest_first
            names = [name for name, _ in sorted(cached, key=key)]
            self._order = {name: index for index, name in enumerate(names)}
        return self._order

    def _cached(self, digests: bytes) -> list[bytes]:
        """The first blocks of a prompt that some worker holds."""
        most = max(self._overlaps(digests).values(), default=0)
        return list(split_digests(digests[: most * DIGEST_BYTES]))


def _longest_first(cached: tuple[RequestId, list[bytes]]) -> int:
    return -len(cached[1])


def _depth_first(
    waiting: list[tuple[RequestId, list[bytes]]],
) -> Callable[[tuple[RequestId, list[bytes]]], Key]:
    """Order by a depth-first walk through the blocks, the most waited-for branches first.

    A digest names a whole prefix, so the digests of a prompt are its path from the root. Those that
    stop at a block come after those that go on below it, which share more.
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
            if weights[digest] != weight:  # while nothing branches off, a block says nothing new
                weight = weights[digest]
                branches.append((-weight, first[digest]))
        return (*branches, STOP)

    return key
