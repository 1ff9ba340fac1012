"""What plans are gathered from: arrays with an entry a slot, written when something changes."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import numpy as np

from antiphon.model_worker.batching.layout import Layout
from antiphon.model_worker.batching.logits import LogitsProcessors
from antiphon.model_worker.batching.logprobs import LogprobsSlots
from antiphon.model_worker.batching.plan import Ints, SamplingColumns
from antiphon.model_worker.cache.groups import HOLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.model_worker.batching.request import BatchRow, Request
    from antiphon.model_worker.cache.pages import PageTable

_INT32_MAX = 2**31 - 1
_WIDTH = 64


class Slots:
    """The places of running requests, and their part of each plan, ready to be gathered.

    A step of n decodes changes next to nothing here: a length each, and a page for one in
    `page_tokens` of them. Building lists of n parameters and page tables anew in each step cost
    more than all the rest of planning.

    Attributes:
        length: Tokens that the request in a slot knows; 0 in an empty one.
        tokens_max: Its longest length.
        exact: Whether it surely gets there.
        entries: Entries of its page table, a cache group.
        pages_held: Pages that it holds, a cache group: as many, but for the holes of a window.
        steering: What changes its logits.
        telling: What is told of its tokens.
    """

    def __init__(self, slots_max: int, groups: int, vocab_size: int) -> None:
        self.length = np.zeros(slots_max, np.int64)
        self.tokens_max = np.zeros(slots_max, np.int64)
        self.exact = np.zeros(slots_max, np.bool_)
        self.entries = [np.zeros(slots_max, np.int64) for _ in range(groups)]
        self.pages_held = [np.zeros(slots_max, np.int64) for _ in range(groups)]
        self.logits_processors = LogitsProcessors(slots_max, vocab_size)
        self.logprobs = LogprobsSlots()
        self._free = list(range(slots_max))  # a heap, so that low slots are used first
        self._tables = [np.full((slots_max, _WIDTH), HOLE, np.int32) for _ in range(groups)]
        self._revisions = [0] * slots_max
        self._sampling = SamplingColumns(
            temperature=np.zeros(slots_max, np.float32),
            top_p=np.ones(slots_max, np.float32),
            min_p=np.zeros(slots_max, np.float32),
            top_k=np.zeros(slots_max, np.int32),
            seed=np.zeros(slots_max, np.int64),
            choice=np.zeros(slots_max, np.int32),
        )
        self._layout: Layout | None = None
        self._copied: tuple[Ints, tuple[Ints, ...]] | None = None

    @property
    def free_count(self) -> int:
        """Slots that nobody has."""
        return len(self._free)

    @property
    def last_layout(self) -> Layout | None:
        """That of the last plan; None if somebody has come since."""
        return self._layout

    def take(self) -> int:
        """Give out a slot. There is one."""
        return heapq.heappop(self._free)

    def fill(self, request: Request) -> None:
        """Write down the request that has just got its slot and its table."""
        slot, sampling, columns = request.slot, request.state.sampling, self._sampling
        self._layout = None
        self.length[slot] = request.length
        self.tokens_max[slot] = request.tokens_max
        self.exact[slot] = request.exact
        # Greedy is written one way, so that the runner has one thing to look for.
        columns.temperature[slot] = 0 if sampling.greedy else sampling.temperature
        columns.top_p[slot] = sampling.top_p
        columns.min_p[slot] = sampling.min_p
        columns.top_k[slot] = min(sampling.top_k, _INT32_MAX)
        columns.seed[slot] = sampling.seed
        columns.choice[slot] = request.state.choice
        self.logits_processors.fill(request)
        self.logprobs.fill(request)
        self._rewrite(request)

    def give_back(self, slot: int) -> None:
        """The request in a slot is gone."""
        self.length[slot] = self.tokens_max[slot] = 0
        self.logits_processors.clear(slot)
        self.logprobs.clear(slot)
        groups = zip(self._tables, self.entries, self.pages_held, strict=True)
        for table, entries, held in groups:
            table[slot, : entries[slot]] = HOLE
            entries[slot] = held[slot] = 0
        heapq.heappush(self._free, slot)

    def update(self, request: Request) -> None:
        """The page table of a running request has changed."""
        slot, table = request.slot, request.table
        assert table is not None, "a running request has no pages"
        if table.revision != self._revisions[slot]:
            self._rewrite(request)
            return
        for group, entries in enumerate(self.entries):
            self._write(group, slot, table, int(entries[slot]))

    def layout(self, rows: Sequence[BatchRow]) -> Layout:
        """How these rows lie in a plan: as those of the plan before, where nobody came or went."""
        shapes = [(row.request.slot, row.length, row.draws) for row in rows]
        if self._layout is None or self._layout.shapes != shapes:
            self._layout = Layout.of(shapes, self._sampling)
        return self._layout

    def page_tables(self, slots: Ints) -> tuple[Ints, ...]:
        """A copy of the page tables of these slots, (R, N) a cache group.

        Plans of the same layout share it while none of the tables changes.
        """
        if self._copied is None or self._copied[0] is not slots:
            groups = zip(self._tables, self.entries, strict=True)
            copies = [table[slots, : max(entries[slots].tolist())] for table, entries in groups]
            self._copied = slots, tuple(copies)
        return self._copied[1]

    def _rewrite(self, request: Request) -> None:
        slot, table = request.slot, request.table
        assert table is not None, "a running request has no pages"
        for group, entries in enumerate(self.entries):
            self._tables[group][slot, len(table.pages(group)) : entries[slot]] = HOLE
            self._write(group, slot, table, 0)
        self._revisions[slot] = table.revision

    def _write(self, group: int, slot: int, table: PageTable, start: int) -> None:
        """Write the entries of a page table from `start` on."""
        self._copied = None
        pages = table.pages(group)
        count = len(pages)
        if count > self._tables[group].shape[1]:
            self._widen(group, count)
        self._tables[group][slot, start:count] = pages[start:]
        self.entries[group][slot] = count
        self.pages_held[group][slot] = table.held(group)

    def _widen(self, group: int, count: int) -> None:
        old = self._tables[group]
        wide = np.full((len(old), max(count, 2 * old.shape[1])), HOLE, np.int32)
        wide[:, : old.shape[1]] = old
        self._tables[group] = wide
