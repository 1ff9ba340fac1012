"""What a runner keeps by slot: page tables and sampling parameters, as plans change them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from antiphon.model_worker.batching.plan import NO_COLUMNS, SamplingColumns, SlotChanges
from antiphon.model_worker.cache.groups import HOLE, GroupKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.model_worker.batching.plan import Ints, StepPlan
    from antiphon.model_worker.batching.request import Request
    from antiphon.model_worker.cache.groups import CacheGroup

_SLOTS = 64
_ENTRIES = 64


class ChangeLog:
    """Gathers the changes of the next plan, on the host."""

    def __init__(self, groups: int) -> None:
        self._started: dict[int, Request] = {}
        self._entries = [_NewEntries() for _ in range(groups)]
        self._changed = False

    def start(self, request: Request) -> None:
        """Note that a request has got its slot, whose page tables are empty again."""
        self._changed = True
        self._started[request.slot] = request
        for entries in self._entries:
            entries.drop(request.slot)

    def release(self, slot: int) -> None:
        """Forget what the runner need not know of a slot that is free again."""
        self._started.pop(slot, None)

    def set(self, group: int, slot: int, place: int, pages: Sequence[int]) -> None:
        """Note new entries of the page table of a slot, from `place` on."""
        count = len(pages)
        self.add(group, [slot] * count, range(place, place + count), pages)

    def add(
        self, group: int, slots: Sequence[int], places: Sequence[int], pages: Sequence[int]
    ) -> None:
        """Note one new entry for each of the slots."""
        self._changed = True
        entries = self._entries[group]
        entries.slots += slots
        entries.places += places
        entries.pages += pages

    def read(self) -> SlotChanges | None:
        """All changes that no launched plan has; None if there are none."""
        if not self._changed:
            return None
        started = self._started
        sampling = SamplingColumns.zeros(len(started)) if started else NO_COLUMNS
        for row, request in enumerate(started.values()):
            sampling.set(row, request.state.sampling, request.state.choice)
        return SlotChanges(
            slots=np.array(list(started), np.int32),
            sampling=sampling,
            entries=tuple([each.array() for each in self._entries]),
        )

    def clear(self) -> None:
        """Forget the changes, since the plan that has them is launched."""
        if self._changed:
            self._changed = False
            self._started = {}
            self._entries = [_NewEntries() for _ in self._entries]


class _NewEntries:
    """Entries of page tables of one group that are not in a plan yet, in the order of changes."""

    def __init__(self) -> None:
        self.slots: list[int] = []
        self.places: list[int] = []
        self.pages: list[int] = []

    def drop(self, slot: int) -> None:
        if slot not in self.slots:
            return
        kept = [index for index, other in enumerate(self.slots) if other != slot]
        self.slots = [self.slots[index] for index in kept]
        self.places = [self.places[index] for index in kept]
        self.pages = [self.pages[index] for index in kept]

    def array(self) -> Ints:
        return np.array([self.slots, self.places, self.pages], np.int32)


class SlotTables:
    """The page tables and sampling parameters of all slots, after the changes of plans.

    Axes: S slots, N entries of a table, R rows.
    """

    def __init__(self, groups: Sequence[CacheGroup]) -> None:
        self._are_states = [group.kind is GroupKind.STATE for group in groups]
        self._tables = [np.full((_SLOTS, _ENTRIES), HOLE, np.int32) for _ in groups]
        self._lengths = [np.zeros(_SLOTS, np.int64) for _ in groups]  # (S,) places written
        self._sampling = SamplingColumns.zeros(_SLOTS)
        self._slots: Ints | None = None  # of the rows of the last plan, and what was read of them
        self._read: tuple[Ints, ...] = ()
        self._columns = self._sampling

    def apply(self, changes: SlotChanges) -> None:
        """Apply the changes of a plan."""
        self._make_room(changes)
        self._read = ()
        if len(changes.slots):
            self._slots = None
            self._sampling.put(changes.slots, changes.sampling)
            for table, lengths in zip(self._tables, self._lengths, strict=True):
                table[changes.slots] = HOLE
                lengths[changes.slots] = 0
        for group, (slots, places, pages) in enumerate(changes.entries):
            self._tables[group][slots, places] = pages
            np.maximum.at(self._lengths[group], slots, places + 1)

    def fill(self, plan: StepPlan) -> StepPlan:
        """A plan with the page tables and sampling parameters of its rows, after its changes."""
        if plan.page_tables:
            return plan
        if plan.changes is not None:
            self.apply(plan.changes)
        tables, sampling = self._of(plan.slot)
        if plan.states:
            states = iter(plan.states)
            pairs = zip(tables, self._are_states, strict=True)
            tables = tuple([next(states) if is_state else table for table, is_state in pairs])
        return msgspec.structs.replace(plan, page_tables=tables, sampling=sampling)

    def snapshot(self) -> SlotChanges:
        """Changes that lead here from empty tables."""
        slots = np.arange(len(self._tables[0]), dtype=np.int32)
        entries: list[Ints] = []
        for table in self._tables:
            at, places = np.nonzero(table != HOLE)
            entries.append(np.stack([at, places, table[at, places]]).astype(np.int32))
        return SlotChanges(slots=slots, sampling=self._sampling.of(slots), entries=tuple(entries))

    def _of(self, slots: Ints) -> tuple[tuple[Ints, ...], SamplingColumns]:
        """What there is of the rows of a plan; read again only if something may have changed."""
        if slots is not self._slots:
            self._slots, self._columns, self._read = slots, self._sampling.of(slots), ()
        if not self._read:
            self._read = tuple(
                [
                    table[slots, : lengths[slots].max(initial=0)]
                    for table, lengths in zip(self._tables, self._lengths, strict=True)
                ]
            )
        return self._read, self._columns

    def _make_room(self, changes: SlotChanges) -> None:
        rows = 1 + max(_last(part) for part in (changes.slots, *(e[0] for e in changes.entries)))
        width = 1 + max(_last(entries[1]) for entries in changes.entries)
        if rows > len(self._sampling.seed):
            self._sampling = self._sampling.grown(2 * rows)
            self._tables = [_grown(table, 2 * rows, table.shape[1]) for table in self._tables]
            more = np.zeros(2 * rows - len(self._lengths[0]), np.int64)
            self._lengths = [np.append(lengths, more) for lengths in self._lengths]
        if width > self._tables[0].shape[1]:
            self._tables = [_grown(table, len(table), 2 * width) for table in self._tables]


def _last(values: Ints) -> int:
    return int(values.max(initial=-1))


def _grown(table: Ints, rows: int, width: int) -> Ints:
    grown = np.full((rows, width), HOLE, np.int32)
    grown[: table.shape[0], : table.shape[1]] = table
    return grown
