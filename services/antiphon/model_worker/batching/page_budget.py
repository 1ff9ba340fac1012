"""Pages that there are, and pages that those who run are expected to take yet."""

from __future__ import annotations

import math
from operator import le
from typing import TYPE_CHECKING

import numpy as np

from antiphon.model_worker.batching.ratio import NewTokenRatio
from antiphon.model_worker.cache.groups import STATES_RUNNING, GroupKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from antiphon.model_worker.batching.admission import EngineLimits
    from antiphon.model_worker.batching.plan import Longs
    from antiphon.model_worker.batching.request import Request
    from antiphon.model_worker.batching.slots import Slots
    from antiphon.model_worker.cache.groups import CacheGroup
    from antiphon.model_worker.cache.index import PrefixIndex
    from antiphon.model_worker.cache.table import CachePools, PageTable

ANSWER_TOKENS_MAX = 4096
"""Nobody's answer is expected to go on for longer than this, whatever was asked for."""


class PageBudget:
    """Decides by pages, a group, who may start.

    A request is expected to write a share of what it may still write, or all of it if it ignores
    the model's end: see `NewTokenRatio`. What is expected is kept free, but not taken.

    Attributes:
        before_eviction: Called before the index has to give up pages.
    """

    def __init__(
        self,
        limits: EngineLimits,
        pools: CachePools,
        index: PrefixIndex,
        slots: Slots,
        *,
        indexed: bool,
    ) -> None:
        self.ratio = NewTokenRatio(limits.conservativeness)
        self._pools = pools
        self._index = index
        self._slots = slots
        self.before_eviction: Callable[[], None] = _nothing
        # What ends gives its pages back for certain only where no index holds on to them, and
        # everything is needed to the end only by full groups.
        self._countable = not indexed and all(g.kind is GroupKind.FULL for g in pools.groups)
        self._growth_max = [_growth_max(group, limits) for group in pools.groups]

    def available(self) -> list[int]:
        """Pages a group that nobody needs: free, on their way back, or given up on demand."""
        return [
            pool.total - pool.used_count + loose
            for pool, loose in zip(self._pools.pools, self._index.evictable(), strict=True)
        ]

    def ensure_free(self, needs: Sequence[int]) -> bool:
        """Whether so many pages a group are free now, after the index gave up what it must."""
        free = self._pools.free()
        if all(map(le, needs, free)):
            return True
        self.before_eviction()
        self._index.evict([max(0, need - have) for need, have in zip(needs, free, strict=True)])
        return all(map(le, needs, self._pools.free()))

    def pending_free(self, needs: Sequence[int]) -> bool:
        """Whether so many pages will be free once the launched plans have finished."""
        return all(
            need <= pool.total - pool.used_count
            for need, pool in zip(needs, self._pools.pools, strict=True)
        )

    def growth(self) -> list[Longs]:
        """Pages a group that the request in each slot is expected to take yet."""
        slots = self._slots
        left = np.minimum(slots.tokens_max - slots.length, ANSWER_TOKENS_MAX)
        share = np.where(slots.exact, 1.0, self.ratio.value)
        tokens = slots.length + np.ceil(left * share).astype(np.int64)
        return [
            np.clip(_table_len(group, tokens) - entries, 0, np.maximum(most - held, 0))
            for group, entries, held, most in zip(
                self._pools.groups, slots.entries, slots.pages_held, self._growth_max, strict=True
            )
        ]

    def reserved(self) -> list[int]:
        """Pages a group that all running requests are expected to take yet."""
        return [int(growth.sum()) for growth in self.growth()]

    def reclaimable(self) -> Callable[[Request], list[int]]:
        """Tells how many pages a group a running request would leave, with those promised to it."""
        slots = self._slots
        left = [
            (growth + held).tolist()
            for growth, held in zip(self.growth(), slots.pages_held, strict=True)
        ]
        holes = [
            (entries - held).tolist()
            for entries, held in zip(slots.entries, slots.pages_held, strict=True)
        ]

        def of(request: Request) -> list[int]:
            # What it found in the cache when it started may be held by others as well, but for
            # what a window has left behind, and a state with its first row.
            cached, slot = request.found_tokens, request.slot
            return [
                left[index][slot] - max(0, group.table_len(cached) - holes[index][slot])
                if index not in self._pools.states
                else left[index][slot]
                for index, group in enumerate(self._pools.groups)
            ]

        return of

    def needed(self, request: Request, cached_tokens: int) -> list[int]:
        """Pages a group that a request takes and is expected to take if it starts now."""
        left = min(request.tokens_max - request.length, ANSWER_TOKENS_MAX)
        share = 1.0 if request.exact else self.ratio.value
        tokens = request.length + math.ceil(left * share)
        return [
            min(max(0, group.table_len(tokens) - group.shared_len(cached_tokens)), most)
            for group, most in zip(self._pools.groups, self._growth_max, strict=True)
        ]

    def fits_known_lengths(self, request: Request, available: Sequence[int]) -> bool:
        """Whether a request fits beside the others for certain, all lengths being known."""
        slots = self._slots
        running = slots.length > 0
        if not (self._countable and request.exact and slots.exact[running].all()):
            return False
        lengths = np.append(slots.length[running], request.length)
        left = np.append(slots.tokens_max[running], request.tokens_max) - lengths
        return all(
            fits_exactly(lengths, left, np.append(held[running], 0), group.page_tokens, pages)
            for group, held, pages in zip(
                self._pools.groups, slots.pages_held, available, strict=True
            )
        )

    def allocate(self, table: PageTable, tokens: int) -> bool:
        """Give a table the pages for `tokens` tokens, if they are free or can be freed now."""
        if not table.covers(tokens):
            if not self.ensure_free(table.need(tokens)):
                return False
            table.allocate(tokens)
        return True


def _nothing() -> None:
    """Nobody cares what is evicted."""


def fits(wanted: Sequence[int], promised: Sequence[int], available: Sequence[int]) -> bool:
    """Whether somebody may start beside those to whom pages are promised."""
    return all(w + p <= a for w, p, a in zip(wanted, promised, available, strict=True))


def fits_exactly(
    lengths: Longs, left: Longs, held: Longs, page_tokens: int, available: int
) -> bool:
    """Whether requests of known length get through together without running out of pages.

    Their ends are spread out, and pages come back at each one: the sum of what all of them need
    at their end is more than is ever needed at once. Looks at the moment before each end, with
    every request's last page counted as full; O(n log n).

    Args:
        lengths: Tokens that each request has.
        left: Tokens that each is going to draw, one a step.
        held: Pages that each has, and gives back at its end.
        page_tokens: Tokens of a page.
        available: Pages that are free beside.
    """
    order = np.argsort(left, kind="stable")
    lengths, left, held = lengths[order], left[order], held[order]
    count = np.arange(len(left), 0, -1)  # those who have not ended, before each end
    tokens = np.cumsum(lengths[::-1])[::-1] + count * left
    pages = (tokens + count * (page_tokens - 1)) / page_tokens
    return bool((pages <= available + held.sum()).all())


def _growth_max(group: CacheGroup, limits: EngineLimits) -> int:
    """The most pages of a group that a request ever has: a window group lets go of the rest."""
    longest = limits.context_tokens
    if group.window is not None:
        chunk = limits.context_tokens if limits.chunk_tokens is None else limits.chunk_tokens
        longest = min(longest, group.window + chunk + group.page_tokens)
    return group.table_len(longest)


def _table_len(group: CacheGroup, tokens: Longs) -> Longs:
    """`CacheGroup.table_len` of many lengths."""
    if group.kind is GroupKind.STATE:
        return np.minimum(tokens, 1) * STATES_RUNNING
    return -(-tokens // group.page_tokens)
