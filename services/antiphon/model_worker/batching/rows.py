"""The rows of a step, and sets of slots."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from antiphon.model_worker.batching.plan import Flags, Ints, Longs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.model_worker.batching.plan import Indices


class SlotSet(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Slots, and how arrays are indexed by them: neighbours by a slice, which copies nothing."""

    slots: Ints  # (R,)
    at: slice | Ints

    @classmethod
    def of(cls, slots: Sequence[int] | Ints) -> SlotSet:
        array = np.asarray(slots, np.int32)
        count = len(array)
        if count:
            first, last = array.item(0), array.item(-1)
            ascends = last - first == count - 1
            if ascends and np.count_nonzero(array[1:] - array[:-1] == 1) == count - 1:
                return cls(array, slice(first, last + 1))
        return cls(array, array)

    def __len__(self) -> int:
        return len(self.slots)

    def take(self, which: Flags | Indices) -> SlotSet:
        return SlotSet.of(self.slots[which])


class StepRows(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The rows of a step: tokens `[starts, ends)` of the request in each slot.

    `generations` are those of the slots when the rows were launched: the outcome of a row whose
    slot has another one by then is dropped. The first `decodes` rows have one token each and sample
    the next one; those after them, one for each of `drafts`, verify these; prefill chunks follow.

    While drafts of its slot are in flight, a row has a `future_start`, where these end: its start
    and end here are upper bounds. `draft_counts` are the drafts that a draft model makes after it;
    None: there is no draft model. `states` are those of the plan.

    Axis: R rows.
    """

    slots: SlotSet
    starts: Longs  # (R,)
    ends: Longs  # (R,)
    draws: Flags  # (R,) whether a token is sampled after it: not within a prompt
    generations: Longs  # (R,)
    decodes: int
    drafts: tuple[Ints, ...] = ()
    future_start: Flags | None = None  # (R,) None: no row
    draft_counts: Ints | None = None  # (R,)
    states: tuple[Ints, ...] = ()  # (R, 1 + W) by group of recurrent states

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def verified(self) -> int:
        """Where the verify rows end and prefill chunks begin."""
        return self.decodes + len(self.drafts)

    @property
    def prefill_rows(self) -> int:
        return len(self.starts) - self.decodes - len(self.drafts)

    @property
    def prefill_tokens(self) -> int:
        """Number of tokens of the prefill chunks."""
        first = self.verified
        return int((self.ends[first:] - self.starts[first:]).sum())

    @property
    def logit_counts(self) -> Longs:
        """(R,) how many tokens of a row are followed by a sampled one."""
        counts = self.draws.astype(np.int64)
        if self.drafts:
            counts[self.decodes : self.verified] += np.array([len(ids) for ids in self.drafts])
        return counts

    def take(self, index: Indices) -> StepRows:
        """Some of the rows, by ascending index."""
        first, last = map(int, np.searchsorted(index, (self.decodes, self.verified)))
        return StepRows(
            slots=self.slots.take(index),
            starts=self.starts[index],
            ends=self.ends[index],
            draws=self.draws[index],
            generations=self.generations[index],
            decodes=first,
            drafts=tuple([self.drafts[int(row) - self.decodes] for row in index[first:last]]),
            future_start=None if self.future_start is None else self.future_start[index],
            draft_counts=None if self.draft_counts is None else self.draft_counts[index],
            states=tuple([states[index] for states in self.states]),
        )


@cache
def all_draw(rows: int) -> Flags:
    """That every row draws, (R,): most steps have decodes alone. Shared by them."""
    draws = np.ones(rows, np.bool_)
    draws.flags.writeable = False
    return draws


NO_SLOTS = SlotSet.of(())
NO_ROWS = StepRows(
    slots=NO_SLOTS,
    starts=np.zeros(0, np.int64),
    ends=np.zeros(0, np.int64),
    draws=np.zeros(0, np.bool_),
    generations=np.zeros(0, np.int64),
    decodes=0,
)
