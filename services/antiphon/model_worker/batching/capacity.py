"""What a worker could take on: what the cluster's scheduler counts its credit from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.model_worker.batching.page_budget import PageBudget
    from antiphon.model_worker.batching.slots import Slots
    from antiphon.model_worker.cache.index import PrefixIndex
    from antiphon.model_worker.cache.table import CachePools

HORIZON_STEPS = 32
"""How far ahead the release of pages is predicted: about as long as a bound request is on its way
and queues, and so near that few answers end in between without it being known."""


class PoolUse(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Pages of one group: all, those that nobody holds, and those that only the cache holds."""

    total: int
    free: int
    evictable: int

    @property
    def used(self) -> int:
        """Pages that requests hold."""
        return self.total - self.free - self.evictable


class Capacity(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Pages of the group that has the fewest to offer, recurrent states aside: slots count them.

    Attributes:
        pages_free: That nobody holds.
        pages_evictable: That only the prefix cache holds: as good as free.
        pages_promised: Of these two, those that running requests are expected to take yet.
        pages_returning: That surely come back within `HORIZON_STEPS` decodes, because their
            requests reach the end that they asked for. Others come back, too, at ends that nobody
            knows.
        slots_free: Requests that could be started.
        sequence_tokens: Tokens of all running requests.
        window: Pages of the group of sliding windows that has the fewest to offer, if there is one.
        states: Recurrent states, likewise.
    """

    pages_free: int
    pages_evictable: int
    pages_promised: int
    pages_returning: int
    slots_free: int
    sequence_tokens: int = 0
    window: PoolUse | None = None
    states: PoolUse | None = None

    @property
    def pages_available(self) -> int:
        """What a new request may count on; negative if too much was promised."""
        return self.pages_free + self.pages_evictable - self.pages_promised


def measure_capacity(
    pools: CachePools, index: PrefixIndex, budget: PageBudget, slots: Slots
) -> Capacity:
    """How things stand now. Some additions over arrays of slots, whatever the load."""
    left = slots.tokens_max - slots.length
    ending = (slots.length > 0) & (left <= HORIZON_STEPS)
    sequence_tokens = int(slots.length.sum())
    window, states = _least(pools, index, pools.windows), _least(pools, index, pools.states)
    groups = list(
        zip(pools.free(), index.evictable(), budget.reserved(), slots.pages_held, strict=True)
    )
    return min(
        (
            Capacity(
                pages_free=free,
                pages_evictable=evictable,
                pages_promised=reserved,
                pages_returning=int(np.sum(held, where=ending)),
                slots_free=slots.free_count,
                sequence_tokens=sequence_tokens,
                window=window,
                states=states,
            )
            for free, evictable, reserved, held in (groups[i] for i in pools.measured)
        ),
        key=lambda one: one.pages_available,
    )


def _least(pools: CachePools, index: PrefixIndex, groups: Sequence[int]) -> PoolUse | None:
    """Of these groups the one that has the fewest pages to offer."""
    if not groups:
        return None
    free, evictable = pools.free(), index.evictable()
    group = min(groups, key=lambda each: free[each] + evictable[each])
    total = pools.groups[group].pages_total
    return PoolUse(total=total, free=free[group], evictable=evictable[group])
