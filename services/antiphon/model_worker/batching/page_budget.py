"""The page budget: whether a request may start, and the capacity that is left."""

from __future__ import annotations

import math
from operator import le
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from antiphon.model_worker.cache.groups import GroupKind

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from antiphon.model_worker.batching.plan import Longs
    from antiphon.model_worker.batching.request import Request
    from antiphon.model_worker.batching.slot_arrays import SlotArrays
    from antiphon.model_worker.batching.state import EngineLimits
    from antiphon.model_worker.cache.groups import CacheGroup
    from antiphon.model_worker.cache.pages import CachePools, PageTable
    from antiphon.model_worker.cache.radix import RadixIndex

ANSWER_TOKENS_MAX = 4096
"""Maximum number of further output tokens for which pages are reserved, as in SGLang."""

HORIZON_STEPS = 32
"""How far ahead the release of pages is predicted: about as long as a request takes from its
placement to its start, and so near that few requests finish unpredicted in between."""

_RATIO_START = 0.7
_RATIO_LEAST = 0.14  # of the start
_DECAY_STEPS = 600
_GRACE_TOKENS = 20


class PageBudget:
    """Decides by the pages of each group whether a request may start.

    A request is expected to generate a share of its remaining output tokens, or all of them if it
    sets `ignore_eos`: see `NewTokenRatio`. The pages for these are reserved, but not allocated.
    `before_eviction` is called before the prefix cache evicts pages.
    """

    def __init__(
        self, limits: EngineLimits, pools: CachePools, index: RadixIndex, batch: SlotArrays
    ) -> None:
        self.ratio = NewTokenRatio(limits.conservativeness)
        self._pools = pools
        self._index = index
        self._batch = batch
        self.in_flight: Sequence[int] = [0] * len(pools.groups)
        """Pages by group that transfers hold: they are free, or can be evicted, once these end."""
        self.before_eviction: Callable[[], None] = lambda: None
        # A finished request frees its pages for certain only where no prefix cache holds on to
        # them, and only full groups need every page until then.
        full = all(group.kind is GroupKind.FULL for group in pools.groups)
        self._countable = full and not index.enabled
        self._growth_max = [_growth_max(group, limits) for group in pools.groups]

    def available(self) -> list[int]:
        """Available pages by group: free, pending free, or evictable."""
        return [
            pool.total - pool.used_count + loose
            for pool, loose in zip(self._pools.pools, self._index.evictable(), strict=True)
        ]

    def has_free(self, needs: Sequence[int]) -> bool:
        """Whether so many pages by group are free now, without an eviction."""
        return all(map(le, needs, self._pools.free()))

    def ensure_free(self, needs: Sequence[int]) -> bool:
        """Evict what must be evicted; whether so many pages by group are free now."""
        short = [need - free for need, free in zip(needs, self._pools.free(), strict=True)]
        if max(short) <= 0:
            return True
        self.before_eviction()
        self._index.evict([max(0, pages) for pages in short])
        return self.has_free(needs)

    def pending_free(self, needs: Sequence[int]) -> bool:
        """Whether so many pages are free once launched plans and transfers have finished."""
        return all(
            need <= pool.total - pool.used_count + moving
            for need, pool, moving in zip(needs, self._pools.pools, self.in_flight, strict=True)
        )

    def growth(self) -> list[Longs]:
        """Pages by group that the request in each slot is still expected to need."""
        batch = self._batch
        left = np.minimum(batch.tokens_max - batch.length, ANSWER_TOKENS_MAX)
        expected = np.ceil(left * self.ratio.value).astype(np.int64)
        if np.count_nonzero(batch.exact):
            expected = np.where(batch.exact, left, expected)
        tokens = batch.length + expected
        growths = [
            np.maximum(group.table_len(tokens) - entries, 0)
            for group, entries in zip(self._pools.groups, batch.entries, strict=True)
        ]
        for group in self._pools.windows:
            most = self._growth_max[group] - batch.pages_held[group]
            growths[group] = np.minimum(growths[group], np.maximum(most, 0))
        return growths

    def reserved(self) -> list[int]:
        return [int(growth.sum()) for growth in self.growth()]

    def reclaimable(self) -> Callable[[Request], list[int]]:
        """A function: pages by group that retracting a request frees, reserved ones included."""
        batch, growths = self._batch, self.growth()

        def of(request: Request) -> list[int]:
            gains: list[int] = []
            for index, group in enumerate(self._pools.groups):
                held = batch.pages_held[index].item(request.slot)
                gains.append(growths[index].item(request.slot) + held)
                if index not in self._pools.states:  # a state is its own from its first row on
                    # What was cached when it started may be shared, but for a window's holes.
                    holes = batch.entries[index].item(request.slot) - held
                    gains[-1] -= max(0, group.table_len(request.found_tokens) - holes)
            return gains

        return of

    def needed(self, request: Request, cached_tokens: int) -> list[int]:
        """Pages by group that a request needs, expected growth included, if it starts now."""
        length = request.length
        left = min(request.tokens_max - length, ANSWER_TOKENS_MAX)
        tokens = length + math.ceil(left * (1.0 if request.exact else self.ratio.value))
        return [
            min(max(0, group.table_len(tokens) - group.shared_len(cached_tokens)), most)
            for group, most in zip(self._pools.groups, self._growth_max, strict=True)
        ]

    def fits(self, request: Request, cached_tokens: int, reserved: Sequence[int]) -> bool:
        available, needed = self.available(), self.needed(request, cached_tokens)
        sums = zip(needed, reserved, available, strict=True)
        return all(need + taken <= most for need, taken, most in sums) or (
            self._fits_known_lengths(request, available)
        )

    def allocate(self, table: PageTable, tokens: int) -> bool:
        """Allocate a table's pages for `tokens` tokens, if they are free or can be freed now."""
        if not table.covers(tokens):
            if not self.ensure_free(table.need(tokens)):
                return False
            table.allocate(tokens)
        return True

    def capacity(self) -> Capacity:
        """The capacity now. A few array operations over the slots, whatever the load."""
        pools, batch = self._pools, self._batch
        ending = batch.tokens_max - batch.length <= HORIZON_STEPS
        free, evictable, reserved = pools.free(), self._index.evictable(), self.reserved()
        group = min(pools.measured, key=lambda one: free[one] + evictable[one] - reserved[one])
        return Capacity(
            pages_free=free[group],
            pages_evictable=evictable[group],
            pages_reserved=reserved[group],
            pages_returning=int(batch.pages_held[group][ending].sum()),
            slots_free=batch.free_count,
            sequence_tokens=int(batch.length.sum()),
            window=self._scarcest(pools.windows),
            states=self._scarcest(pools.states),
        )

    def _scarcest(self, groups: Sequence[int]) -> PoolUse | None:
        if not groups:
            return None
        free, evictable = self._pools.free(), self._index.evictable()
        group = min(groups, key=lambda each: free[each] + evictable[each])
        total = self._pools.groups[group].pages_total
        return PoolUse(total=total, free=free[group], evictable=evictable[group])

    def _fits_known_lengths(self, request: Request, available: Sequence[int]) -> bool:
        """Whether a request certainly fits beside the running ones, all lengths being known."""
        batch = self._batch
        running = batch.length > 0
        if not (self._countable and request.exact and batch.exact[running].all()):
            return False
        lengths = np.append(batch.length[running], request.length)
        left = np.append(batch.tokens_max[running], request.tokens_max) - lengths
        return all(
            fits_exactly(lengths, left, np.append(held[running], 0), group.page_tokens, pages)
            for group, held, pages in zip(
                self._pools.groups, batch.pages_held, available, strict=True
            )
        )


class NewTokenRatio:
    """The share of its remaining output tokens that admission reserves for each running request.

    Outputs end early: to reserve all of it would leave most of the pool idle, and to reserve none
    would admit requests only to retract them. The share decays from step to step, and jumps to what
    proved to be needed when a request had to be retracted. The numbers are SGLang's (0.5.23,
    `new_token_ratio`).
    """

    def __init__(self, conservativeness: float) -> None:
        self._start = min(_RATIO_START * conservativeness, 1.0)
        self._least = _RATIO_LEAST * self._start
        self.value = self._start

    def decay(self) -> None:
        self.value = max(self._least, self.value - (self._start - self._least) / _DECAY_STEPS)

    def retracted(self, running: Collection[Request]) -> None:
        """Jump to what the remaining requests have generated."""
        generated = sum(request.outputs_count for request in running)
        longest = sum(request.tokens_max - request.prompt_tokens for request in running)
        self.value = min(1.0, (generated + _GRACE_TOKENS * len(running)) / (longest + 1))

    def reset(self) -> None:
        self.value = self._start


class Capacity(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Pages of the group with the fewest available, recurrent states aside: slots count those.

    Attributes:
        pages_returning: Pages that are certainly freed within `HORIZON_STEPS` decode steps, because
            their requests reach their maximum length. Others are freed by unpredictable finishes.
    """

    pages_free: int
    pages_evictable: int
    pages_reserved: int  # of these two kinds, those reserved for running requests
    pages_returning: int
    slots_free: int
    sequence_tokens: int = 0
    waiting_tokens: int = 0  # to prefill, outputs of retracted requests included
    waiting_retracted: int = 0
    window: PoolUse | None = None  # of the sliding-window group with the fewest available
    states: PoolUse | None = None  # likewise


class PoolUse(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Pages of one group: all, the free ones, and those that only the prefix cache holds."""

    total: int
    free: int
    evictable: int

    @property
    def used(self) -> int:
        return self.total - self.free - self.evictable


def fits_exactly(
    lengths: Longs, left: Longs, held: Longs, page_tokens: int, available: int
) -> bool:
    """Whether requests of known length can run together without running out of pages.

    They finish at different times, and each then frees its pages: the sum of what all of them need
    at their end is more than is ever needed at once. Looks at the moment before each one finishes,
    with every request's last page counted as full; O(n log n).

    A request of `lengths` tokens, in `held` pages, generates `left` more, one a step. Further pages
    are `available`.
    """
    order = np.argsort(left, kind="stable")
    lengths, left, held = lengths[order], left[order], held[order]
    count = np.arange(len(left), 0, -1)  # requests that still run, before each one finishes
    tokens = np.cumsum(lengths[::-1])[::-1] + count * left
    pages = (tokens + count * (page_tokens - 1)) / page_tokens
    return bool((pages <= available + held.sum()).all())


def _growth_max(group: CacheGroup, limits: EngineLimits) -> int:
    """Maximum number of pages of a group that a request ever holds: a window frees the rest."""
    longest = limits.context_tokens
    if group.window is not None:
        chunk = limits.context_tokens
        if limits.chunk_tokens is not None:
            chunk = max(limits.chunk_tokens, limits.alone_tokens or 0)
        longest = min(longest, group.window + chunk + group.page_tokens)
    return group.table_len(longest)
