"""The rows of a step, and sets of slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.model_worker.batching.plan import Flags, Indices, Ints, Longs


@dataclass(frozen=True, slots=True)
class SlotSet:
    """Slots, and how arrays are indexed by them: neighbours by a slice, which copies nothing."""

    slots: Ints  # (R,)
    at: slice | Ints

    @classmethod
    def of(cls, slots: Sequence[int] | Ints) -> SlotSet:
        array = np.asarray(slots, np.int32)
        count = len(array)
        if count:
            first = int(array[0])
            if count == 1 or (array == np.arange(first, first + count)).all():
                return cls(array, slice(first, first + count))
        return cls(array, array)

    def __len__(self) -> int:
        return len(self.slots)

    def take(self, which: Flags | Indices) -> SlotSet:
        return SlotSet.of(self.slots[which])


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step: tokens `[starts, ends)` of the request in each slot.

    `generations` are those of the slots when the rows were launched: the outcome of a row whose
    slot has another one by then is dropped. The first `decodes` rows have one token each and sample
    the next one; prefill chunks follow.

    Axis: R rows.
    """

    slots: SlotSet
    starts: Longs  # (R,)
    ends: Longs  # (R,)
    draws: Flags  # (R,) whether a token is sampled after it: not within a prompt
    generations: Longs  # (R,)
    decodes: int

    def __len__(self) -> int:
        return len(self.starts)

    def take(self, index: Indices) -> StepRows:
        """Some of the rows, by ascending index."""
        return StepRows(
            slots=self.slots.take(index),
            starts=self.starts[index],
            ends=self.ends[index],
            draws=self.draws[index],
            generations=self.generations[index],
            decodes=int(np.searchsorted(index, self.decodes)),
        )


NO_SLOTS = SlotSet.of(())
NO_ROWS = StepRows(
    slots=NO_SLOTS,
    starts=np.zeros(0, np.int64),
    ends=np.zeros(0, np.int64),
    draws=np.zeros(0, np.bool_),
    generations=np.zeros(0, np.int64),
    decodes=0,
)
