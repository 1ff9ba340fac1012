"""The running batch: requests with slots and pages, shared prefixes, and the plan of their rows."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from antiphon.model_worker.batching.logprobs import pooling_request, token_types
from antiphon.model_worker.batching.page_budget import PageBudget
from antiphon.model_worker.batching.plan import StepPlan
from antiphon.model_worker.batching.request import PendingPrefix
from antiphon.model_worker.batching.slots import Slots
from antiphon.model_worker.cache.hashing import CacheKey, request_namespace
from antiphon.model_worker.cache.radix import RadixIndex
from antiphon.model_worker.cache.table import PageTable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from antiphon.model_worker.batching.layout import Layout
    from antiphon.model_worker.batching.plan import Ints
    from antiphon.model_worker.batching.request import BatchRow, Request
    from antiphon.model_worker.batching.state import ChoiceKey, EngineLimits
    from antiphon.model_worker.cache.hashing import Namespace
    from antiphon.model_worker.cache.radix import Prefix, RadixIndex
    from antiphon.model_worker.cache.table import CachePools


WORTH_TOKENS = 32
"""Minimum prefix worth waiting for, or worth a checkpoint. A shorter one is prefilled again."""


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
        self._namespace = namespace
        self.running: dict[int, Request] = {}
        self.slots = Slots(limits.running_max, len(pools.groups), limits.vocab_size)
        self.page_budget = PageBudget(limits, pools, index, self.slots, indexed=indexed)
        self._namespace_digest = namespace.digest()
        self.checkpoints = _checkpoints(limits, pools) if indexed else None
        self.prefix_sharing = PrefixSharing(
            pools.page_tokens,
            self._namespace_digest,
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
        match = self.index.match(self._key(request))
        fork = self.prefix_sharing.fork(request, match.length)
        if fork is not None and match.table is not None:
            match.table.release()
        return fork or match.table or PageTable(self.pools)

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


class PrefixSharing:
    """The prefilling requests, by their first page.

    Without a prefix cache only the choices of one request share: the common prefix is forked from
    the page table of the first one. With a prefix cache it is found there, whichever request
    computed it. A table with recurrent states cannot be forked: what is shared ends at a
    checkpoint, in the prefix cache. A prefill that other weights began, of another `namespace`, is
    not shared.
    """

    def __init__(
        self,
        page_tokens: int,
        namespace: bytes,
        *,
        indexed: bool,
        forks: bool = True,
        checkpoints: StateCheckpoints | None = None,
    ) -> None:
        self.namespace = namespace
        self._page_tokens = page_tokens
        self._indexed = indexed
        self._forks = forks
        self._checkpoints = checkpoints
        self._leaders: dict[bytes, list[tuple[int, Request]]] = {}
        self._led: dict[ChoiceKey, tuple[bytes, int]] = {}
        self._numbers = count(1)

    def register(self, request: Request) -> None:
        """Let other requests wait for the prefix of one that has started."""
        if request.length > self._page_tokens:
            first_page, number = self._first_page(request), next(self._numbers)
            self._led[request.key] = first_page, number
            self._leaders.setdefault(first_page, []).append((number, request))

    def unregister(self, request: Request) -> None:
        led = self._led.pop(request.key, None)
        if led is not None:
            first_page, number = led
            leaders = self._leaders[first_page]
            leaders.remove((number, request))
            if not leaders:
                del self._leaders[first_page]

    def should_wait(self, request: Request, cached_tokens: Callable[[Request], int]) -> bool:
        """Whether a waiting request should wait until another one has prefilled their prefix."""
        if request.following is not None and request.following.computing:
            return True
        leaders = self._leaders.get(self._first_page(request))
        if not leaders:
            return False
        cached = cached_tokens(request)
        # A leader that shares too little always will, unless less of the request is cached: a long
        # prompt is compared with each leader once, not in each step in which it is next.
        passed, least = request.passed_leaders
        passed = passed if cached >= least else 0
        for number, leader in leaders:
            if number <= passed:
                continue
            following = self._follow(request, leader, cached)
            if following is not None:
                request.following = following
                return True
        request.passed_leaders = leaders[-1][0], cached
        return False

    def shared_tokens(self, request: Request) -> int:
        """Length of the prefix that `fork` shares: 0 where the leader's window has moved on."""
        following = request.following
        if following is None or not following.ready or not self._forks:
            return 0
        if following.leader.namespace is not self.namespace:
            return 0
        return following.table.shareable_tokens(following.tokens)

    def fork(self, request: Request, cached_tokens: int) -> PageTable | None:
        """A table that shares the pending prefix, if it is longer than the cached one."""
        following, tokens = request.following, self.shared_tokens(request)
        if following is None or tokens <= cached_tokens:
            return None
        return following.table.fork(tokens)

    def _first_page(self, request: Request) -> bytes:
        """Key of requests that may share a prefix: salt and first tokens."""
        return request.state.cache_salt + request.token_bytes(self._page_tokens)

    def _follow(
        self, request: Request, leader: Request, cached_tokens: int
    ) -> PendingPrefix | None:
        siblings = leader.state.request_id == request.state.request_id
        if (
            not ((siblings and self._forks) or self._indexed)
            or leader.namespace is not self.namespace
        ):
            return None
        # At least one token is computed by the request itself, to sample the next one from it.
        longest = min(leader.length, request.shared_max, request.length) - 1
        common = _common_length(leader, request, longest) // self._page_tokens * self._page_tokens
        if self._checkpoints is not None:
            common = self._checkpoints.last(common, leader.length)
        worth = self._page_tokens if siblings else max(self._page_tokens, WORTH_TOKENS)
        if common - cached_tokens < worth or leader.table is None:
            return None
        following = PendingPrefix(leader, leader.table, common)
        return following if following.computing else None


class StateCheckpoints(msgspec.Struct, frozen=True, kw_only=True):
    """Checkpoints at multiples of `every` tokens, and at the last page border of a prompt.

    A state belongs to one position only, unlike pages: a prefix matches at a checkpoint and nowhere
    between two of them. Each costs a state's memory, and a prefill chunk that ends there.
    """

    every: int  # tokens; whole pages
    page_tokens: int

    def due(self, tokens: int) -> bool:
        """Whether the state after so many tokens is cached while decoding."""
        return tokens % self.every == 0

    def stop(self, start: int, end: int) -> int:
        """The latest end of a prefill chunk at `start`, of a prompt that ends at `end`."""
        following = (start // self.every + 1) * self.every
        border = self._border(end)
        if following > border > start:
            following = border
        return min(following, end)

    def last(self, agreed: int, end: int) -> int:
        """The last checkpoint within the first `agreed` tokens of a prompt that ends at `end`."""
        border = self._border(end)
        return border if 0 < border <= agreed else agreed // self.every * self.every

    def _border(self, end: int) -> int:
        """The last page border of a prompt; 0 if a checkpoint there is not worth it."""
        border = end // self.page_tokens * self.page_tokens
        return border if border % self.every >= WORTH_TOKENS else 0


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
        adapter=layout.adapter,
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
        release_fence=step,
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


def _common_length(a: Request, b: Request, longest: int) -> int:
    if longest <= 0:
        return 0
    different = np.flatnonzero(a.ids[:longest] != b.ids[:longest])
    return int(different[0]) if len(different) else longest
