"""The free capacity of a worker, which the scheduler needs to place requests."""

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
"""How far ahead the release of pages is predicted: about as long as a request takes from its
placement to its start, and so near that few requests finish unpredicted in between."""


class PoolUse(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Pages of one group: all, the free ones, and those that only the prefix cache holds."""

    total: int
    free: int
    evictable: int

    @property
    def used(self) -> int:
        """Pages that requests hold."""
        return self.total - self.free - self.evictable


class Capacity(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Pages of the group with the fewest available, recurrent states aside: slots count those.

    Attributes:
        pages_free: Free pages.
        pages_evictable: Pages that only the prefix cache holds: as good as free.
        pages_promised: Pages of these two kinds that are reserved for running requests.
        pages_returning: Pages that are certainly freed within `HORIZON_STEPS` decode steps, because
            their requests reach their maximum length. Others are freed by unpredictable finishes.
        slots_free: Requests that could be started.
        sequence_tokens: Tokens of all running requests.
        window: Pages of the sliding-window group with the fewest available, if there is one.
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
        """Pages available to a new request; negative if more are reserved than there are."""
        return self.pages_free + self.pages_evictable - self.pages_promised


def measure_capacity(
    pools: CachePools, index: PrefixIndex, budget: PageBudget, slots: Slots
) -> Capacity:
    """Measure the capacity now. A few array operations over the slots, whatever the load."""
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
    """The use of the group with the fewest available pages."""
    if not groups:
        return None
    free, evictable = pools.free(), index.evictable()
    group = min(groups, key=lambda each: free[each] + evictable[each])
    total = pools.groups[group].pages_total
    return PoolUse(total=total, free=free[group], evictable=evictable[group])
