"""The running batch: requests with slots and pages, the page budget, and the plan of their rows."""

from __future__ import annotations

import math
from operator import le
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from antiphon.model_worker.batching.logprobs import pooling_request, token_types
from antiphon.model_worker.batching.plan import Ints, Longs, StepPlan
from antiphon.model_worker.batching.prefix_sharing import PrefixSharing, StateCheckpoints
from antiphon.model_worker.batching.slots import Slots
from antiphon.model_worker.cache.groups import STATES_RUNNING, CacheGroup, GroupKind
from antiphon.model_worker.cache.hashing import CacheKey, Namespace, request_namespace
from antiphon.model_worker.cache.pages import CachePools, PageTable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from antiphon.model_worker.batching.layout import Layout
    from antiphon.model_worker.batching.request import BatchRow, Request
    from antiphon.model_worker.batching.state import EngineLimits
    from antiphon.model_worker.cache.radix import Prefix, RadixIndex

ANSWER_TOKENS_MAX = 4096
"""Maximum number of further output tokens for which pages are reserved, as in SGLang."""

HORIZON_STEPS = 32
"""How far ahead the release of pages is predicted: about as long as a request takes from its
placement to its start, and so near that few requests finish unpredicted in between."""

ScheduledRow = tuple["Request", int]
"""A running request, and the end of its next row in tokens of the request."""

_RATIO_START = 0.7
_RATIO_LEAST = 0.14  # of the start
_DECAY_STEPS = 600
_GRACE_TOKENS = 20


class RunningBatch:
    """The running requests by slot, in the order of their starts, and the resources they need.

    Without recurrent states or a prefix cache there are no `checkpoints`.
    """

    def __init__(
        self, limits: EngineLimits, pools: CachePools, index: RadixIndex, namespace: Namespace
    ) -> None:
        indexed = index.enabled
        self.pools = pools
        self.index = index
        self.steps = 0  # scheduled since start, those of the decode fast path included
        self._namespace = namespace
        self.running: dict[int, Request] = {}
        self.slots = Slots(limits.running_max, len(pools.groups), limits.vocab_size)
        self.page_budget = PageBudget(limits, pools, index, self.slots, indexed=indexed)
        self._namespace_digest = namespace.digest()
        self.checkpoints = _checkpoints(limits, pools) if indexed else None
        self.prefix_sharing = PrefixSharing(
            page_tokens=pools.page_tokens,
            namespace=self._namespace_digest,
            indexed=indexed,
            forks=not pools.states,
            checkpoints=self.checkpoints,
        )

    def set_weight_version(self, weight_version: str) -> int:
        """Compute with other weights from here on; return the number of evicted pages."""
        self._namespace = msgspec.structs.replace(self._namespace, weight_version=weight_version)
        self._namespace_digest = self.prefix_sharing.namespace = self._namespace.digest()
        return self.index.clear()

    def cached_tokens(self, request: Request) -> int:
        return self.prefix(request).length

    def prefix(self, request: Request) -> Prefix:
        """The cached prefix of a waiting request; matched again only if the cache has changed."""
        generation = self.index.generation
        if request.prefix is None or request.prefix[0] != generation:
            request.prefix = (generation, self.index.peek(self._key(request)))
        return request.prefix[1]

    def touch(self, request: Request) -> None:
        """Protect the cached prefix of a waiting request that is about to start from eviction."""
        self.index.touch(self._key(request))

    def shared_tokens(self, request: Request) -> int:
        """Tokens of a waiting request that `cached_table` would hold."""
        return max(self.cached_tokens(request), self.prefix_sharing.shared_tokens(request))

    def cached_table(self, request: Request) -> PageTable:
        """A table with the longest cached or shared prefix of a waiting request."""
        cached = self.index.match(self._key(request)) or PageTable(self.pools)
        if (fork := self.prefix_sharing.fork(request, cached.committed)) is None:
            return cached
        cached.release()
        return fork

    def start(self, request: Request, table: PageTable, now: float) -> None:
        """Start a request with this table, in one of the free slots, of which there must be one."""
        if table.committed:
            self.index.use(self._key(request), table.committed)
        request.start(self.slots.take(), table, now)
        request.namespace = self._namespace_digest
        self.running[request.slot] = request
        self.slots.fill(request)
        self.prefix_sharing.register(request)

    def cache_prefix(self, request: Request, tokens_max: int | None = None) -> None:
        """Insert the computed tokens into the prefix cache, if the current weights computed them.

        Only the first `tokens_max` tokens are inserted, should later ones not be part of the
        response.
        """
        assert request.table is not None, "a running request has no pages"
        if request.namespace is self._namespace_digest:
            computed = min(request.computed, request.length)
            tokens = request.token_bytes(min(computed, tokens_max or computed))
            self.index.insert(self._named(request, tokens), request.table)
        self.slots.update(request)

    def allocate_pages(self, scheduled: Sequence[ScheduledRow]) -> bool:
        """Allocate the pages of the next rows, unless a request would have to be retracted."""
        if not self.page_budget.ensure_free(pages_needed(scheduled)):
            return False
        for request, end in scheduled:
            assert request.table is not None, "a running request has no pages"
            request.table.allocate(end)
            self.slots.update(request)
        return True

    def count_decode_steps(self, steps: int) -> None:
        self.steps += steps
        for _ in range(steps):
            self.page_budget.ratio.decay()

    def release(self, request: Request) -> None:
        assert request.table is not None, "a running request has no pages"
        self.prefix_sharing.unregister(request)
        request.table.release()
        del self.running[request.slot]
        self.slots.give_back(request.slot)

    def _key(self, request: Request) -> CacheKey:
        """The cache key of a waiting request, made once for the current weights."""
        if request.cache_key is None or request.cache_key[0] is not self._namespace_digest:
            key = self._named(request, request.token_bytes(max(1, request.shared_max)))
            request.cache_key = self._namespace_digest, key
        return request.cache_key[1]

    def _named(self, request: Request, token_ids: bytes) -> CacheKey:
        namespace = request_namespace(self._namespace_digest, request.state.cache_salt)
        return CacheKey(namespace=namespace, token_ids=token_ids)


class PageBudget:
    """Decides by the pages of each group whether a request may start.

    A request is expected to generate a share of its remaining output tokens, or all of them if it
    sets `ignore_eos`: see `NewTokenRatio`. The pages for these are reserved, but not allocated.
    `before_eviction` is called before the prefix cache evicts pages.
    """

    def __init__(
        self,
        limits: EngineLimits,
        pools: CachePools,
        index: RadixIndex,
        slots: Slots,
        *,
        indexed: bool,
    ) -> None:
        self.ratio = NewTokenRatio(limits.conservativeness)
        self._pools = pools
        self._index = index
        self._slots = slots
        self.before_eviction: Callable[[], None] = lambda: None
        # A finished request frees its pages for certain only where no prefix cache holds on to
        # them, and only full groups need every page until then.
        self._countable = not indexed and all(g.kind is GroupKind.FULL for g in pools.groups)
        self._growth_max = [_growth_max(group, limits) for group in pools.groups]

    def available(self) -> list[int]:
        """Available pages by group: free, pending free, or evictable."""
        return [
            pool.total - pool.used_count + loose
            for pool, loose in zip(self._pools.pools, self._index.evictable(), strict=True)
        ]

    def ensure_free(self, needs: Sequence[int]) -> bool:
        """Evict what must be evicted; whether so many pages by group are free now."""
        free = self._pools.free()
        if all(map(le, needs, free)):
            return True
        self.before_eviction()
        self._index.evict([max(0, need - have) for need, have in zip(needs, free, strict=True)])
        return all(map(le, needs, self._pools.free()))

    def pending_free(self, needs: Sequence[int]) -> bool:
        """Whether so many pages are free once the launched plans have finished."""
        return all(
            need <= pool.total - pool.used_count
            for need, pool in zip(needs, self._pools.pools, strict=True)
        )

    def growth(self) -> list[Longs]:
        """Pages by group that the request in each slot is still expected to need."""
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
        return [int(growth.sum()) for growth in self.growth()]

    def reclaimable(self) -> Callable[[Request], list[int]]:
        """A function: pages by group that retracting a request frees, reserved ones included."""
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
            # What was cached when the request started may be shared with others, but for what a
            # window has left behind, and a state from its first row on.
            cached, slot = request.found_tokens, request.slot
            return [
                left[index][slot] - max(0, group.table_len(cached) - holes[index][slot])
                if index not in self._pools.states
                else left[index][slot]
                for index, group in enumerate(self._pools.groups)
            ]

        return of

    def needed(self, request: Request, cached_tokens: int) -> list[int]:
        """Pages by group that a request needs, expected growth included, if it starts now."""
        left = min(request.tokens_max - request.length, ANSWER_TOKENS_MAX)
        share = 1.0 if request.exact else self.ratio.value
        tokens = request.length + math.ceil(left * share)
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
        pools, slots = self._pools, self._slots
        left = slots.tokens_max - slots.length
        ending = (slots.length > 0) & (left <= HORIZON_STEPS)
        sequence_tokens = int(slots.length.sum())
        free, evictable, reserved = pools.free(), self._index.evictable(), self.reserved()
        window, states = self._scarcest(pools.windows), self._scarcest(pools.states)
        return min(
            (
                Capacity(
                    pages_free=free[group],
                    pages_evictable=evictable[group],
                    pages_promised=reserved[group],
                    pages_returning=int(np.sum(slots.pages_held[group], where=ending)),
                    slots_free=slots.free_count,
                    sequence_tokens=sequence_tokens,
                    window=window,
                    states=states,
                )
                for group in pools.measured
            ),
            key=lambda one: one.pages_available,
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
        generated = sum(request.outputs for request in running)
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
    pages_promised: int  # of these two kinds, those reserved for running requests
    pages_returning: int
    slots_free: int
    sequence_tokens: int = 0
    window: PoolUse | None = None  # of the sliding-window group with the fewest available
    states: PoolUse | None = None  # likewise

    @property
    def pages_available(self) -> int:
        """Pages available to a new request; negative if more are reserved than there are."""
        return self.pages_free + self.pages_evictable - self.pages_promised


class PoolUse(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Pages of one group: all, the free ones, and those that only the prefix cache holds."""

    total: int
    free: int
    evictable: int

    @property
    def used(self) -> int:
        return self.total - self.free - self.evictable


def build_plan(step: int, rows: Sequence[BatchRow], slots: Slots) -> StepPlan:
    """The plan of these rows, in the order given. Their requests must have their slots."""
    layout = slots.layout(rows)
    tokens, positions, kv_len = _decodes(rows) if layout.decodes else _chunks(rows, layout)
    processors = slots.logits_processors
    masks = masked = penalties = biases = None
    if not processors.idle:
        masks, masked = processors.masks(rows)
        penalties = processors.penalties(rows, layout.slot, layout.draws)
        biases = processors.biases(rows)
    pooling = None if layout.decodes else pooling_request(rows)
    return StepPlan(
        step=step,
        slot=layout.slot,
        query_start=layout.query_start,
        query_len=layout.query_len,
        kv_len=kv_len,
        tokens=tokens,
        positions=positions,
        logit_tokens=layout.logit_tokens,
        sampling=layout.sampling,
        page_tables=_page_tables(rows, layout.slot, slots),
        penalties=penalties,
        token_masks=masks,
        token_mask_rows=masked,
        biases=biases,
        details=slots.logprobs.request(rows, layout.query_start),
        pooling=pooling,
        token_types=None if pooling is None else token_types(rows),
    )


def _decodes(rows: Sequence[BatchRow]) -> tuple[Ints, Ints, Ints]:
    """`_chunks` for rows of one token each, in one array for all."""
    tokens = [row.request.ids.item(row.start) for row in rows]
    starts = [row.start for row in rows]
    ends = [start + 1 for start in starts]
    columns = np.array((tokens, starts, ends), np.int32)
    return columns[0], columns[1:2], columns[2]


def _chunks(rows: Sequence[BatchRow], layout: Layout) -> tuple[Ints, Ints, Ints]:
    """Tokens and positions of all rows, and the KV length at the end of each row."""
    start = np.array([row.start for row in rows], np.int32)
    tokens = np.concatenate([row.request.ids[row.start : row.end] for row in rows])
    positions = layout.index + start[layout.row]
    return tokens, positions[np.newaxis, :], start + layout.query_len


def _page_tables(rows: Sequence[BatchRow], slot: Ints, slots: Slots) -> tuple[Ints, ...]:
    """The page tables by group; for a state group, the states that each row reads and writes."""
    first = rows[0].request.table
    assert first is not None, "a running request has no pages"
    tables = slots.page_tables(slot)
    if not first.chains:
        return tables
    tables = list(tables)
    for group in first.chains:
        pairs = [
            row.request.table.chains[group].pair(row.start)
            for row in rows
            if row.request.table is not None
        ]
        tables[group] = np.array(pairs, np.int32)
    return tuple(tables)


def _checkpoints(limits: EngineLimits, pools: CachePools) -> StateCheckpoints | None:
    if not pools.states:
        return None
    assert limits.checkpoint_tokens % pools.page_tokens == 0, "a checkpoint within a page"
    return StateCheckpoints(every=limits.checkpoint_tokens, page_tokens=pools.page_tokens)


def pages_needed(scheduled: Sequence[ScheduledRow]) -> list[int]:
    """Pages by group that all of these rows still need."""
    each = [request.table.need(end) for request, end in scheduled if request.table is not None]
    return [sum(needs) for needs in zip(*each, strict=True)]


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
        chunk = limits.context_tokens if limits.chunk_tokens is None else limits.chunk_tokens
        longest = min(longest, group.window + chunk + group.page_tokens)
    return group.table_len(longest)


def _table_len(group: CacheGroup, tokens: Longs) -> Longs:
    """`CacheGroup.table_len` for many lengths."""
    if group.kind is GroupKind.STATE:
        return np.minimum(tokens, 1) * STATES_RUNNING
    return -(-tokens // group.page_tokens)
