"""The running batch: requests with slots and pages, their cached prefixes, and their step plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from antiphon.model_worker.batching.logprobs import pooling_request, token_types
from antiphon.model_worker.batching.page_budget import PageBudget
from antiphon.model_worker.batching.plan import StepPlan
from antiphon.model_worker.batching.prefix_sharing import PrefixSharing, StateCheckpoints
from antiphon.model_worker.batching.slots import Slots
from antiphon.model_worker.cache.hashing import request_namespace
from antiphon.model_worker.cache.index import CacheKey, NoIndex
from antiphon.model_worker.cache.table import PageTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.model_worker.batching.layout import Layout
    from antiphon.model_worker.batching.plan import Ints
    from antiphon.model_worker.batching.request import BatchRow, Request
    from antiphon.model_worker.batching.state import EngineLimits
    from antiphon.model_worker.cache.hashing import Namespace
    from antiphon.model_worker.cache.index import Prefix, PrefixIndex
    from antiphon.model_worker.cache.table import CachePools


class RunningBatch:
    """The running requests by slot, in the order of their starts, and the resources they need.

    Without recurrent states or a prefix cache there are no `checkpoints`.
    """

    def __init__(
        self, limits: EngineLimits, pools: CachePools, index: PrefixIndex, namespace: Namespace
    ) -> None:
        indexed = not isinstance(index, NoIndex)
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

    def checkpoint_due(self, request: Request) -> bool:
        return self.checkpoints is not None and self.checkpoints.due(request.computed)

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


def _checkpoints(limits: EngineLimits, pools: CachePools) -> StateCheckpoints | None:
    if not pools.states:
        return None
    assert limits.checkpoint_tokens % pools.page_tokens == 0, "a checkpoint within a page"
    return StateCheckpoints(every=limits.checkpoint_tokens, page_tokens=pools.page_tokens)


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
