"""A cache group is what it declares: any tensors and entries go through tables, codec and store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tests.bench.micro.bench_batching import VOCAB_SIZE, fake_outcome
from tests.support.page_store import BLOCK_PAGES, PAGE_TOKENS, cluster
from tests.support.wait import until
from tests.support.worker import limits, state

from antiphon.model_worker.batching.engine_core import EngineCore
from antiphon.model_worker.batching.page_transfers import TransferLimits
from antiphon.model_worker.batching.plan_builder import build_plan
from antiphon.model_worker.batching.state import ChoiceKey
from antiphon.model_worker.cache.codec import PageCodec, RecordInvalid
from antiphon.model_worker.cache.groups import HOLE, CacheGroup, CacheTensor, GroupKind
from antiphon.model_worker.cache.pages import CachePools, PageTable
from antiphon.model_worker.cache.radix import RadixIndex
from antiphon.model_worker.cache.tree import CacheKey
from antiphon.model_worker.runner.pools import GroupMemory
from antiphon.transfer.checksums import page_checksum
from antiphon.wire.codec import pack_ids
from antiphon.wire.digests import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.support.page_store import PageStoreUser

COMPRESSED = CacheGroup(
    kind=GroupKind.FULL,
    layers=(0, 2),
    tensors=(
        CacheTensor(name="rows", dtype="float8_e4m3fn", shape=(2, 24)),
        CacheTensor(name="scales", dtype="float32", shape=(2,)),
        CacheTensor(name="index", dtype="float32", shape=(5,)),
    ),
    entry_tokens=4,
    page_tokens=PAGE_TOKENS,
    pages_total=40,
)
LATENTS = CacheGroup(
    kind=GroupKind.LATENT,
    layers=(1,),
    tensors=(CacheTensor(name="latents", dtype="bfloat16", shape=(1, 40)),),
    page_tokens=PAGE_TOKENS,
    pages_total=40,
)
WINDOW = CacheGroup(
    kind=GroupKind.WINDOW,
    layers=(3,),
    tensors=(CacheTensor(name="keys", dtype="bfloat16", shape=(2, 8)),),
    page_tokens=PAGE_TOKENS,
    pages_total=40,
    window=20,
)
STATES = CacheGroup(
    kind=GroupKind.STATE,
    layers=(4, 5),
    tensors=(
        CacheTensor(name="convolution", dtype="bfloat16", shape=(3, 6)),
        CacheTensor(name="recurrence", dtype="float32", shape=(2, 4, 4)),
    ),
    page_tokens=PAGE_TOKENS,
    pages_total=12,
)
MODELS = {
    "compressed": (COMPRESSED,),
    "latents": (LATENTS,),
    "hybrid": (COMPRESSED, STATES),
    "all": (COMPRESSED, LATENTS, WINDOW, STATES),
}
PROMPT = range(20, 220)
STORED = 192


def test_page_has_room_for_the_declared_entries() -> None:
    entry = 2 * 24 + 2 * 4 + 5 * 4
    assert COMPRESSED.page_bytes == len(COMPRESSED.layers) * (PAGE_TOKENS // 4) * entry
    rows, scales, _ = GroupMemory(COMPRESSED, torch.device("cpu")).layer(1)
    assert rows.view(torch.float8_e4m3fn).view(40, 4, 2, 24).shape[0] == COMPRESSED.pages_total
    assert scales.view(torch.float32).view(40, 4, 2).shape[0] == COMPRESSED.pages_total


def test_table_of_a_declared_group_is_allocated_and_truncated() -> None:
    pools = CachePools([COMPRESSED])
    table = PageTable(pools)
    table.allocate(200)
    table.commit(100)
    table.truncate(130)
    assert [len(table.pages(0)), pools.used()[0]] == [9, 9]
    table.release()
    assert pools.used() == [0]


@pytest.mark.parametrize("groups", MODELS.values(), ids=MODELS)
def test_flipped_bit_of_any_group_is_found(groups: Sequence[CacheGroup]) -> None:
    memories = [GroupMemory(group, torch.device("cpu")) for group in groups]
    for memory in memories:
        memory.data.random_(0, 256)
    codec, name = PageCodec(groups, memories), bytes(range(32))
    block = tuple(
        (*[HOLE] * (BLOCK_PAGES - 1), 5) if group.kind is GroupKind.STATE else (3, 1, 4, 2)
        for group in groups
    )
    record = codec.encode(name, block)
    assert len(record) == codec.record_bytes_max
    checksum = page_checksum(record)
    for place in range(0, len(record), 7):
        record[place] ^= 1 << place % 8
        with pytest.raises(RecordInvalid):
            codec.check(name, memoryview(record), checksum)
        record[place] ^= 1 << place % 8
    masks = codec.check(name, memoryview(record), checksum)
    other = tuple(
        (*[HOLE] * (BLOCK_PAGES - 1), 7) if group.kind is GroupKind.STATE else (6, 9, 8, 7)
        for group in groups
    )
    for states in (False, True):
        codec.decode(memoryview(record), masks, other, states=states)
    assert codec.encode(name, other) == record


class Worker:
    """An engine core over pages of real memory, whose steps compute nothing."""

    def __init__(self, groups: Sequence[CacheGroup], user: PageStoreUser) -> None:
        self.pools = CachePools(groups)
        bounds = limits(
            step_tokens_max=256,
            chunk_tokens=64,
            context_tokens=400,
            checkpoint_tokens=64,
            vocab_size=VOCAB_SIZE,
        )
        self.core = EngineCore(bounds, self.pools, RadixIndex(self.pools))
        self.user = user
        self.core.batch.use_store(
            user.client,
            TransferLimits(save_bytes_max=1 << 20, fetch_timeout_s=5.0, fetch_tokens=64),
        )

    async def answer(self) -> list[int]:
        """Compute a request to its end; how many tokens of its prompt each step computes."""
        core, computed, random = self.core, list[int](), np.random.default_rng(0)
        key = ChoiceKey(1)
        core.add(key, state(PROMPT, max_new_tokens=2), 0.0)
        for step in range(1, 100):
            rows = core.next_rows(0.0)
            if core.starved:
                core.land(await self.user.landed.get())
                continue
            if core.idle:
                break
            plan = build_plan(step, rows, core.batch, core.batch.part(rows))
            core.launched(step)
            computed.append(int(plan.query_len.sum()))
            self.pools.finished(step)
            core.commit(rows, fake_outcome(plan, random))
        while core.batch.transfers:
            core.land(await self.user.landed.get())
        return computed

    def cached(self) -> tuple[int, list[bytes]]:
        """How many tokens of the prompt are cached, and the content of what a query needs there."""
        namespace = self.core.batch.prefixes.namespace_of(state(PROMPT))
        key = CacheKey(namespace=namespace, token_ids=pack_ids(PROMPT))
        table = self.core.index.match(key)
        assert table is not None
        block = tuple(
            tuple(page for page in table.pages(group) if page != HOLE)
            for group in range(len(self.pools.groups))
        )
        content, tokens = self.user.content(block), table.committed
        table.release()
        return tokens, content


@pytest.mark.parametrize("groups", MODELS.values(), ids=MODELS)
async def test_pages_of_declared_groups_come_back_from_the_store(
    groups: Sequence[CacheGroup],
) -> None:
    async with cluster(groups=groups) as (user, (node,)):
        first = Worker(groups, user)
        assert sum(await first.answer()) == len(PROMPT) + 1
        tokens, content = first.cached()
        assert tokens == STORED
        assert all(len(each) > 0 for each in content)
        await until(lambda: len(node.service._store.memory.index) == STORED // BLOCK_TOKENS)
        user.fill(2)
        second = Worker(groups, user)
        assert sum(await second.answer()) == len(PROMPT) + 1 - STORED
        assert second.cached() == (STORED, content)
        assert second.pools.used() == second.pools.loose(), "transfers hold no pages"
