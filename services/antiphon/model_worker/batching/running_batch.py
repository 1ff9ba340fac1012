"""The running batch: the state of running requests, as arrays by slot."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from antiphon.model_worker.batching.logits import LogitsProcessors
from antiphon.model_worker.batching.logprobs import LogprobsParams
from antiphon.model_worker.batching.media import MediaLoader
from antiphon.model_worker.batching.page_budget import PageBudget
from antiphon.model_worker.batching.page_transfers import PageTransfers
from antiphon.model_worker.batching.plan import (
    PLAIN,
    Flags,
    Ints,
    Longs,
    SamplingPart,
    future,
)
from antiphon.model_worker.batching.prefixes import Prefixes
from antiphon.model_worker.batching.rows import SlotSet, StepRows, all_draw
from antiphon.model_worker.batching.slot_arrays import SlotArrays
from antiphon.model_worker.batching.slot_tables import ChangeLog
from antiphon.model_worker.batching.token_store import CHUNK_TOKENS, TokenStore
from antiphon.model_worker.cache.groups import HOLE, UNKNOWN_STATE
from antiphon.model_worker.cache.states import StateChains
from antiphon.model_worker.cache.tree import CacheKey

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from antiphon.model_worker.batching.page_transfers import BlockStore, TransferLimits
    from antiphon.model_worker.batching.plan import Floats
    from antiphon.model_worker.batching.request import Request
    from antiphon.model_worker.batching.state import EngineLimits
    from antiphon.model_worker.cache.pages import CachePools, PageTable
    from antiphon.model_worker.cache.radix import RadixIndex
    from antiphon.wire.namespaces import PageOrigin

ScheduledRow = tuple["Request", int]
"""A running request, and the end of its next row in tokens of the request."""


class RunningBatch(SlotArrays):
    """The running requests, the resources that they hold, and their numbers as arrays by slot.

    A step of n decodes is a few array operations on these; `Request` and `PageTable` are for what
    happens seldom. A table's own `committed` may lag behind `computed`: see `committed_table`.

    Attributes:
        running: The requests by slot, in the order of their starts.
        prefills: Those of which a token of the prompt is not launched yet.
        steps: Scheduled since start.
        grammars: Number of running requests with a grammar.
        offsets: Number of those whose positions have an offset.
        chains: Their recurrent states, by group of these.
        transfers: None without a page store.
    """

    def __init__(
        self, limits: EngineLimits, pools: CachePools, index: RadixIndex, origin: PageOrigin
    ) -> None:
        slots = limits.running_max
        super().__init__(slots, len(pools.groups))
        self.pools = pools
        self.index = index
        self.store = TokenStore()
        self.step_tokens_max = limits.step_tokens_max
        self.span_tokens = limits.span_tokens
        self.source_shape = limits.source_shape
        self._flights = limits.flights
        self.steps = 0
        self.grammars = self.offsets = 0
        self.running: dict[int, Request] = {}
        self.prefills: dict[int, Request] = {}
        self._ends = np.zeros(slots, np.bool_)  # (S,) whether an end id of the model ends it
        self._own_ends: dict[int, frozenset[int]] = {}  # of requests with end ids of their own
        self._is_end = np.zeros(limits.vocab_size, np.bool_)
        self._is_end[[token for token in limits.end_ids if token < limits.vocab_size]] = True
        self._chunk = np.zeros(slots, np.int64)  # (S,) of the last output ids
        self.chains = {group: StateChains(pools.pools[group], slots) for group in pools.states}
        for group, chains in self.chains.items():
            self.entries[group], self.pages_held[group] = chains.entries, chains.held
        self.changes = ChangeLog(len(pools.groups))
        self._revisions = [0] * slots
        self.logits = LogitsProcessors(slots, limits.vocab_size, self.running)
        self.logprobs = LogprobsParams(slots, self.running)
        self._decodes: dict[int, Request] = {}
        self._decoding: SlotSet | None = None
        self._drafts: dict[int, list[int]] = {}  # the runner's last ones, where there is a grammar
        self.page_budget = PageBudget(limits, pools, index, self)
        self.prefixes = Prefixes(limits, pools, index, origin)
        self.transfers: PageTransfers | None = None
        self.media = MediaLoader()

    # The prefix cache.

    def set_weight_version(self, weight_version: str) -> int:
        """Compute with other weights from here on; return the number of evicted pages."""
        prefixes = self.prefixes
        prefixes.origin = msgspec.structs.replace(prefixes.origin, weight_version=weight_version)
        self.rowwise[:] = True  # the next progress names the weights
        return self.index.clear()

    def use_tower(self, tower: str) -> None:
        """Compute with the embeddings of another tower from here on, and find pages of those alone.

        No page is evicted: those of the tower before are found again if encoders return to it.
        """
        prefixes = self.prefixes
        prefixes.origin = msgspec.structs.replace(prefixes.origin, tower=tower)
        self.media.tower = tower

    def cache_prefix(self, request: Request, tokens_max: int | None = None) -> None:
        """Insert the computed tokens into the prefix cache, unless it was cleared meanwhile.

        Only the first `tokens_max` tokens are inserted, should later ones not be part of the
        response.
        """
        table = self.committed_table(request)
        if not table.outdated:  # else it may have been computed by other weights
            computed = min(request.computed, request.length)
            tokens = request.token_bytes(min(computed, tokens_max or computed))
            key = CacheKey(namespace=request.namespace, token_ids=tokens)
            self.index.insert(key, table)
            if self.transfers is not None:
                self.transfers.save(request, key, table)
        if table.revision != self._revisions[request.slot]:
            self._rewrite(request, table)

    def use_store(self, store: BlockStore, limits: TransferLimits) -> None:
        """Copy blocks to a page store, and fetch them from it."""
        self.transfers = PageTransfers(self.pools, self.index, store, limits)
        self.page_budget.in_flight = self.transfers.pages

    # Requests come and go.

    def start(self, request: Request, table: PageTable, now: float) -> None:
        """Start a request with this table, in one of the free slots, of which there must be one."""
        if table.committed:
            self.index.use(self.prefixes.key_of(request), table.committed)
        slot, sampling = heapq.heappop(self.free), request.state.sampling
        length, outputs, reported = request.length, request.outputs_count, request.reported
        request.namespace = self.prefixes.key_of(request).namespace
        request.start(self, slot, table, now)
        table.run(self.chains, slot)
        self.running[slot] = self.prefills[slot] = request
        self.keys[slot] = request.key
        self.length[slot] = length
        self.computed[slot] = self.scheduled_len[slot] = self.base_len[slot] = table.committed
        self.in_flight_tokens[slot] = self.slack[slot] = self.drafted[slot] = 0
        self.blocked[slot] = False
        self.generation[slot] += 1
        self.prompt[slot] = request.prompt_tokens
        self.tokens_max[slot] = request.tokens_max
        self.exact[slot] = request.exact
        self.stepwise[slot] = request.stepwise
        self.has_grammar[slot] = request.matcher is not None
        self.grammars += request.matcher is not None
        self.position_offset[slot] = request.position_offset
        self.offsets += request.position_offset != 0
        self.prefilling[slot] = self.rowwise[slot] = True
        self.reported[slot] = reported
        self._ends[slot] = bool(request.end_ids)
        if sampling.stop_token_ids and request.end_ids:
            self._own_ends[slot] = request.end_ids
        if outputs % CHUNK_TOKENS:
            self._chunk[slot] = request.outputs.last_chunk
        self.changes.start(request)
        self.logits.fill(request)
        self.logprobs.fill(request)
        self._rewrite(request, table)
        self.prefixes.register(request)

    def release(self, request: Request) -> None:
        """Release the slot and the pages of a request. It waits then, or is about to end."""
        slot, table = request.slot, request.running_table
        self.prefixes.unregister(request)
        self.media.release(request)
        table.release()
        request.leave()
        del self.running[slot]
        if self.prefills.pop(slot, None) is None:
            del self._decodes[slot]
            self._decoding = None
        self.length[slot] = self.tokens_max[slot] = self.covered[slot] = 0
        self.in_flight_tokens[slot] = 0
        self.generation[slot] += 1
        self.grammars -= request.matcher is not None
        self.offsets -= request.position_offset != 0
        self._own_ends.pop(slot, None)
        self.changes.release(slot)
        self.logits.clear(slot)
        self.logprobs.clear(slot)
        for group in self.pools.paged:
            self.entries[group][slot] = self.pages_held[group][slot] = 0
        heapq.heappush(self.free, slot)

    # Rows.

    @property
    def decoding(self) -> SlotSet:
        """The slots of requests whose prefill is launched to its end."""
        if self._decoding is None:
            self._decoding = SlotSet.of(list(self._decodes))
        return self._decoding

    def next_decodes(self) -> SlotSet:
        """The slots whose next token can be computed now.

        A token in flight counts as known, unless it will be the last one, or the slot is blocked.
        With several flights none does, and each flight has its share of all that decode.
        """
        slots = self.decoding
        in_flight = self.in_flight_tokens[slots.at]
        if self._flights > 1:
            share = -(-len(slots) // self._flights)
            return slots.take(np.flatnonzero(in_flight == 0)[:share])
        if not len(in_flight.nonzero()[0]):
            return slots
        ends = self.length[slots.at] + in_flight
        goes_on = (ends < self.tokens_max[slots.at]) & ~self.blocked[slots.at]
        ready = (in_flight == 0) | goes_on
        return slots if np.count_nonzero(ready) == len(slots) else slots.take(ready)

    def still_running(self, slots: SlotSet) -> SlotSet:
        """Those of the slots that are not free."""
        taken = self.length[slots.at] > 0
        return slots if np.count_nonzero(taken) == len(slots) else slots.take(taken)

    def short(self, slots: SlotSet) -> Flags:
        """(R,) which of these have no page, or no state, for their next token."""
        short = self.scheduled_len[slots.at] >= self.covered[slots.at]
        for chains in self.chains.values():
            short |= chains.short(slots.at)
        return short

    def lacking(self, slots: Ints) -> list[int]:
        """Pages by group that these, which are short, need for their next tokens."""
        lacking = [len(self._without_page(slots))] * len(self.pools.groups)
        for group, chains in self.chains.items():
            lacking[group] = int(np.count_nonzero(chains.short(slots)))
        return lacking

    def add_pages(self, slots: Ints) -> None:
        """Add the pages that these, which are short, need for their next tokens. They are free."""
        for chains in self.chains.values():
            if len(lacking := slots[chains.short(slots)]):
                chains.add(lacking)
        slots = self._without_page(slots)
        tables = [self.running[slot].running_table for slot in slots.tolist()]
        for group in self.pools.paged:
            entries, pages = self.entries[group], self.pools.pools[group].allocate(len(slots))
            self.changes.add(group, slots.tolist(), entries[slots].tolist(), pages)
            entries[slots] += 1
            self.pages_held[group][slots] += 1
            for table, page in zip(tables, pages, strict=True):
                table.append(group, page)
        if not self.pools.paged:
            for table in tables:
                table.reserved += self.pools.page_tokens
        self.covered[slots] += self.pools.page_tokens

    def _without_page(self, slots: Ints) -> Ints:
        """Those of these, which are short, that lack a page; others lack a state."""
        return slots[self.scheduled_len[slots] >= self.covered[slots]] if self.chains else slots

    def launch(
        self,
        decodes: SlotSet,
        drafted: Mapping[int, Ints],
        chunks: Sequence[ScheduledRow],
        counts: Mapping[int, int] | None = None,
    ) -> StepRows:
        """The rows of the next step, marked as launched.

        `drafted` are drafts by slot, `counts` the drafts that a draft model makes after rows.
        """
        slots, first = decodes, len(decodes)
        if drafted or chunks:
            more = [*drafted, *(request.slot for request, _ in chunks)]
            slots = SlotSet.of(np.concatenate([decodes.slots, np.array(more, np.int32)]))
        starts = self.scheduled_len[slots.at].copy()
        ends, draws = starts + 1, all_draw(len(starts))
        if chunks:
            draws = draws.copy()
        for row, drafts in enumerate(drafted.values(), start=first):
            ends[row] += len(drafts)
        for row, (request, end) in enumerate(chunks, start=first + len(drafted)):
            ends[row] = end
            draws[row] = end == request.length and not request.scores
        future_start = draft_counts = None
        if counts is not None:
            future_start = self._future_start(slots)
            draft_counts = self._draft_counts(slots, counts)
        states: tuple[Ints, ...] = ()
        if self.chains:
            states = self._launch_states(slots, first, drafted, future_start)
        rows = StepRows(
            slots=slots,
            starts=starts,
            ends=ends,
            draws=draws,
            generations=self.generation[slots.at].copy(),
            decodes=first,
            drafts=tuple(drafted.values()),
            future_start=future_start,
            draft_counts=draft_counts,
            states=states,
        )
        self.scheduled_len[slots.at] = ends
        self.in_flight_tokens[slots.at] += draws
        for slot, drafts in drafted.items():
            self.in_flight_tokens[slot] += len(drafts)
            self.slack[slot] += len(drafts)
            self.blocked[slot] = counts is None
        for request, end in chunks:
            if end == request.length and not request.scores:
                self._decodes[request.slot] = self.prefills.pop(request.slot)
                self._decoding = None
        return rows

    def has_launched(self, request: Request) -> bool:
        """Whether rows of a running request are launched that are not committed."""
        return self.scheduled_len.item(request.slot) > self.computed.item(request.slot)

    def _launch_states(
        self, slots: SlotSet, decodes: int, drafted: Mapping[int, Ints], future_start: Flags | None
    ) -> tuple[Ints, ...]:
        """The states that these rows read and write, by group; see `StepPlan`."""
        writes = None
        if drafted:
            writes = np.ones(len(slots), np.int64)
            writes[decodes : decodes + len(drafted)] += [len(ids) for ids in drafted.values()]
        states = tuple([chains.launch(slots.at, writes) for chains in self.chains.values()])
        if future_start is not None:
            for each in states:
                each[future_start, 0] = UNKNOWN_STATE
        return states

    def _future_start(self, slots: SlotSet) -> Flags | None:
        future_start = self.slack[slots.at] > 0
        return future_start if np.count_nonzero(future_start) else None

    def _draft_counts(self, slots: SlotSet, counts: Mapping[int, int]) -> Ints:
        listed = [counts.get(slot, 0) for slot in slots.slots.tolist()]
        self.drafted[slots.at] = listed
        return np.array(listed, np.int32)

    def resolved(self, rows: StepRows) -> StepRows:
        """The rows with what was not known of them, once all launched before are committed."""
        if rows.future_start is None:
            return rows
        starts = np.where(rows.future_start, self.computed[rows.slots.at], rows.starts)
        ends = rows.ends - rows.starts + starts
        return msgspec.structs.replace(rows, starts=starts, ends=ends, future_start=None)

    def is_current(self, rows: StepRows) -> Flags:
        """(R,) whether the requests still wait for the outcome of these rows."""
        return self.generation[rows.slots.at] == rows.generations

    def repeat(self, rows: StepRows) -> StepRows:
        """The current `rows`, to run once more: what the runner keeps by slot is written again.

        Drafts of the runner's own are dropped: later plans may have replaced them.
        """
        rows = self.resolved(rows)
        self.base_len[rows.slots.at] = rows.starts
        states = tuple([each.copy() for each in rows.states])
        for each, chains in zip(states, self.chains.values(), strict=True):
            each[:, 0] = chains.current(rows.slots.at)
        if rows.draft_counts is None:
            return msgspec.structs.replace(rows, states=states)
        verified = rows.slots.slots[rows.decodes : rows.verified]
        self.drafted[rows.slots.at] = 0
        self.slack[verified] = 0
        ends = rows.ends.copy()
        ends[rows.decodes : rows.verified] = rows.starts[rows.decodes : rows.verified] + 1
        for chains in self.chains.values():
            for slot in verified.tolist():
                chains.recall(slot)
            chains.launch(verified)
        self.scheduled_len[verified] = ends[rows.decodes : rows.verified]
        self.in_flight_tokens[verified] = 1
        for slot in rows.slots.slots.tolist():
            self.trim(self.running[slot])
        return msgspec.structs.replace(
            rows,
            ends=ends,
            decodes=rows.verified,
            drafts=(),
            draft_counts=np.zeros(len(rows), np.int32),
            states=tuple([each[:, :2] for each in states]),
        )

    def part(self, rows: StepRows) -> SamplingPart:
        """The sampling part of a plan of these rows: of those that are current."""
        if self.logits.idle:
            return PLAIN
        current = self.is_current(rows)
        if rows.draft_counts is not None and self.grammars:
            for row in range(rows.decodes, rows.verified):
                slot = rows.slots.slots.item(row)
                if current[row] and (matcher := self.running[slot].matcher) is not None:
                    matcher.propose(self._drafts[slot][: len(rows.drafts[row - rows.decodes])])
        return self.logits.part(self.resolved(rows), current, self.base_len)

    def note_drafts(self, rows: StepRows, drafts: Ints) -> None:
        """Note what the runner has drafted after these rows, (R, K): masks are made along it."""
        for row in np.flatnonzero(self.has_grammar[rows.slots.at]).tolist():
            self._drafts[rows.slots.slots.item(row)] = drafts[row].tolist()

    def part_follows(self, rows: StepRows) -> bool:
        """Whether what these rows may sample depends on tokens in flight."""
        if self.logits.idle:
            return False
        if rows.future_start is not None:
            return True
        waiting = self.stepwise[rows.slots.at] & (rows.starts >= self.length[rows.slots.at])
        return bool(np.count_nonzero(waiting))

    def defer(self, request: Request) -> None:
        """Block a request until its last tokens are accepted. Rows launched after them are stale.

        These tokens stay in flight.
        """
        self._recall(request)
        self.in_flight_tokens[request.slot] = 1
        self.blocked[request.slot] = True

    def unlaunch(self, rows: StepRows) -> None:
        """Undo `launch` for rows that are not launched after all, or not committed."""
        for slot in rows.slots.slots[self.is_current(rows)].tolist():
            request = self.running[slot]
            self._recall(request)
            self.in_flight_tokens[slot] = 0
            self.blocked[slot] = False
            if request.prefilling and slot in self._decodes:
                self.prefills[slot] = self._decodes.pop(slot)
                self._decoding = None

    def _recall(self, request: Request) -> None:
        """Let the next row begin where the computed tokens end: rows launched before are stale."""
        slot, table, computed = request.slot, request.running_table, request.computed
        for chains in self.chains.values():
            chains.recall(slot)
        self.scheduled_len[slot] = self.base_len[slot] = computed
        self.slack[slot] = self.drafted[slot] = 0
        table.truncate(max(request.length, computed, table.committed))
        self.update(request)
        self.generation[slot] += 1

    def append(self, slots: SlotSet, outputs: Longs, ids: Ints, logprobs: Floats | None) -> None:
        """Append a sampled token to the `outputs` tokens of each of these; all (R,)."""
        offsets = outputs % CHUNK_TOKENS
        if len(offsets.nonzero()[0]) < len(offsets):
            for slot in slots.slots[offsets == 0].tolist():
                self._chunk[slot] = self.running[slot].outputs.add_chunk()
        self.store.write(self._chunk[slots.at], offsets, ids, logprobs)
        self.length[slots.at] += 1
        self.last_token[slots.at] = ids

    def commit_accepted(self, request: Request, launched: int, computed: int) -> None:
        """Note that of the launched tokens of a row so many were right."""
        slot = request.slot
        self.in_flight_tokens[slot] -= launched
        self.slack[slot] -= launched - 1
        self.scheduled_len[slot] -= launched - computed
        self.blocked[slot] = False

    def extend(self, request: Request, ids: Ints, logprobs: Floats | None) -> None:
        """Append several sampled tokens (N,) to the outputs of one request; free surplus pages."""
        slot = request.slot
        if len(ids):
            request.outputs.write(request.outputs_count, ids, logprobs)
            self.length[slot] += len(ids)
            self.last_token[slot] = ids[-1]
            self._chunk[slot] = request.outputs.last_chunk
        self.trim(request)

    def trim(self, request: Request) -> None:
        """Release the pages that neither launched rows nor the next one can need."""
        slot, table = request.slot, request.running_table
        ahead = self.scheduled_len.item(slot) + self.drafted.item(slot)
        table.truncate(max(request.length, ahead + 1))
        self.update(request)

    def are_ends(self, slots: SlotSet, ids: Ints) -> Flags:
        """(R,) which of these sampled tokens end the output of their requests."""
        ends = self._is_end[ids] & self._ends[slots.at]
        if self._own_ends:
            for index, slot in enumerate(slots.slots.tolist()):
                if slot in self._own_ends:
                    ends[index] = ids.item(index) in self._own_ends[slot]
        return ends

    def next_tokens(self, rows: StepRows) -> Ints:
        """(D,) the tokens of the decode rows: ids, or `future` where they are in flight."""
        count, at = rows.decodes, rows.slots.at
        if count < len(rows.starts):
            at = rows.slots.slots[:count]
        unknown = rows.starts[:count] >= self.length[at]
        tokens = self.last_token[at]
        if not len(unknown.nonzero()[0]):
            return tokens.copy()
        return np.where(unknown, future(rows.slots.slots[:count]), tokens)

    # Page tables.

    def committed_table(self, request: Request) -> PageTable:
        """The table of a running request, with all of its computed tokens committed."""
        slot, table, computed = request.slot, request.running_table, request.computed
        if table.committed != computed:
            for group, begin, end in table.commit(computed):
                self.changes.set(group, slot, begin, [HOLE] * (end - begin))
                self.pages_held[group][slot] -= end - begin
        return table

    def commit_computed(self, rows: StepRows, ends: Longs) -> None:
        """Note that these launched rows, the first ones of their slots, are computed to `ends`."""
        slots, pools, moved = rows.slots, self.pools, ()
        for chains in self.chains.values():
            for row, drafts in enumerate(rows.drafts, start=rows.decodes):
                place = ends.item(row) - rows.starts.item(row)
                chains.accept(slots.slots.item(row), 1 + len(drafts), place)
            chains.commit(slots.at)
        if pools.windows:  # they move on from page to page
            before = self.computed[slots.at] // pools.page_tokens
            moved = slots.slots[before != ends // pools.page_tokens].tolist()
        self.computed[slots.at] = ends
        for slot in moved:
            self.committed_table(self.running[slot])

    def update(self, request: Request) -> None:
        """Copy what has changed of the page table of a running request."""
        slot, table = request.slot, request.running_table
        if table.revision != self._revisions[slot]:
            self._rewrite(request, table)
            return
        for group in self.pools.paged:
            self._write(group, slot, table, self.entries[group].item(slot))
        self.covered[slot] = table.reserved

    def _rewrite(self, request: Request, table: PageTable) -> None:
        slot = request.slot
        for group in self.pools.paged:
            surplus = self.entries[group].item(slot) - len(table.pages(group))
            if surplus > 0:
                self.changes.set(group, slot, len(table.pages(group)), [HOLE] * surplus)
            self._write(group, slot, table, 0)
        self.covered[slot] = table.reserved
        self._revisions[slot] = table.revision

    def _write(self, group: int, slot: int, table: PageTable, start: int) -> None:
        """Note the entries of a page table from `start` on. States are in each plan."""
        pages = table.pages(group)
        if start < len(pages):
            self.changes.set(group, slot, start, pages[start:])
        self.entries[group][slot] = len(pages)
        self.pages_held[group][slot] = table.held(group)


def pages_needed(scheduled: Sequence[ScheduledRow]) -> list[int]:
    """Pages by group that all of these rows still need."""
    each = [request.table.need(end) for request, end in scheduled if request.table is not None]
    return [sum(needs) for needs in zip(*each, strict=True)]
