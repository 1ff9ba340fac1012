"""A worker as far as kv_storage sees one: pages of real pools, saved and fetched by its client."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import chain, count
from typing import TYPE_CHECKING

import torch
from msgspec.structs import replace
from tests.support.memory_bus import MemoryBroker, MemoryTransport
from tests.support.page_link import Pipe
from tests.support.services import QUICK, Running, running
from tests.support.wait import until

from antiphon.config.settings import KvStorageConfig
from antiphon.kv_storage.service import KvStorageService
from antiphon.model_worker.batching.page_transfers import BlockTransfer, TransferDone
from antiphon.model_worker.batching.plan_buffer import pack, unpack
from antiphon.model_worker.cache.codec import PageCodec
from antiphon.model_worker.cache.groups import CacheGroup, CacheTensor, GroupKind
from antiphon.model_worker.protocol.page_store import KvStorageClient
from antiphon.model_worker.ranks.layout import RankLayout
from antiphon.model_worker.ranks.page_shards import (
    FollowerShards,
    PageShard,
    PagesRequest,
    WorkerShards,
)
from antiphon.model_worker.ranks.protocol import RankMessage
from antiphon.model_worker.runner.pools import GroupMemory
from antiphon.service.service import Report
from antiphon.wire.base import Role
from antiphon.wire.digests import BLOCK_TOKENS, block_digests, split_digests
from antiphon.wire.namespaces import announced_root

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from antiphon.model_worker.cache.codec import BlockPages
    from antiphon.service.service import Runtime

FETCH_TIMEOUT_S = 5.0
SHARD = RankLayout().shard(0)
PAGE_TOKENS = 16
BLOCK_PAGES = BLOCK_TOKENS // PAGE_TOKENS
KEYS = (
    CacheGroup(
        kind=GroupKind.FULL,
        layers=(0, 1),
        tensors=(CacheTensor(name="keys", dtype="bfloat16", shape=(2, 8)),),
        page_tokens=PAGE_TOKENS,
        pages_total=64,
    ),
)
"""The cache of a model with keys alone."""


class PageStoreUser:
    """The service of `PageStoreUsers`: one client, and the memory that it copies from and to.

    `memories` are those of each rank, by group.
    """

    def __init__(
        self,
        client: KvStorageClient,
        memories: Sequence[Sequence[GroupMemory]],
        landed: asyncio.Queue[TransferDone],
        runtime: Runtime,
    ) -> None:
        self.client = client
        self.memories = memories
        self.runtime = runtime
        self.landed = landed
        self._numbers = count(1)

    def endpoints(self) -> tuple[()]:
        return ()

    def model(self) -> None:
        return None

    def report(self) -> Report:
        return Report(load=0)

    async def drain(self) -> None:
        pass

    def fill(self, seed: int) -> None:
        """Fill all pages with random bytes."""
        for number, memory in enumerate(chain.from_iterable(self.memories)):
            generator = torch.Generator().manual_seed(seed + number)
            shape = memory.data.shape
            memory.data.copy_(torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator))

    def content(self, block: BlockPages) -> list[bytes]:
        """The bytes of the pages of a block, by rank and group."""
        contents: list[bytes] = []
        for memory, pages in chain.from_iterable(
            zip(memories, block, strict=True) for memories in self.memories
        ):
            out = bytearray(len(pages) * memory.group.page_bytes)
            memory.read(pages, memoryview(out))
            contents.append(bytes(out))
        return contents

    async def save(self, namespace: bytes, ids: bytes, blocks: Sequence[BlockPages]) -> None:
        """Copy the blocks of a prompt, and return when the worker's pages are free."""
        transfer = self._transfer(namespace, ids, blocks)
        self.client.save(transfer)
        assert await self.landed.get() == TransferDone(number=transfer.number)

    async def fetch(
        self,
        namespace: bytes,
        ids: bytes,
        blocks: Sequence[BlockPages],
        timeout_s: float = FETCH_TIMEOUT_S,
    ) -> int:
        """Fetch the blocks of a prompt into these pages; how many can be used."""
        transfer = self._transfer(namespace, ids, blocks, timeout_s)
        self.client.fetch(transfer)
        done = await self.landed.get()
        assert done.number == transfer.number
        return done.blocks

    def _transfer(
        self,
        namespace: bytes,
        ids: bytes,
        blocks: Sequence[BlockPages],
        timeout_s: float = 0.0,
    ) -> BlockTransfer:
        digests = tuple(split_digests(block_digests(announced_root(namespace), ids)))
        assert len(digests) == len(blocks), f"a block has {BLOCK_TOKENS} tokens"
        return BlockTransfer(
            number=next(self._numbers),
            namespace=namespace,
            digests=digests,
            first=0,
            blocks=tuple(blocks),
            timeout_s=timeout_s,
        )


class PageStoreUsers:
    """The factory of a `PageStoreUser` with these cache groups, and so many ranks.

    The other ranks run in threads, and get requests as they would in their processes.
    """

    role = Role.WORKER

    def __init__(self, groups: Sequence[CacheGroup], ranks: int = 1) -> None:
        self._groups = groups
        self._layout = RankLayout(tp=ranks)

    @asynccontextmanager
    async def lifespan(self, runtime: Runtime) -> AsyncGenerator[PageStoreUser]:
        ranks = range(self._layout.ranks)
        memories = [
            [GroupMemory(group, torch.device("cpu")) for group in self._groups] for _ in ranks
        ]
        names = [self._layout.shard(rank) for rank in ranks]
        own, *others = (
            PageShard(PageCodec(self._groups, each), name)
            for each, name in zip(memories, names, strict=True)
        )
        pipes = [Pipe() for _ in others]
        followers = [
            FollowerShards(shard, rank, pipe)
            for rank, (shard, pipe) in enumerate(zip(others, pipes, strict=True), start=1)
        ]

        def send(request: PagesRequest) -> None:
            message = pack(RankMessage(pages=request))
            for follower in followers:
                received = unpack(message, RankMessage).pages
                assert received is not None
                follower.begin(received)

        shards = WorkerShards(own, names[1:], pipes, send if others else None)
        landed = asyncio.Queue[TransferDone]()
        async with KvStorageClient.lifespan(runtime, shards, landed.put_nowait) as client:
            yield PageStoreUser(client, memories, landed, runtime)
        for follower in followers:
            follower.close()
        for pipe in pipes:
            pipe.end()


@asynccontextmanager
async def cluster(
    nodes: int = 1, groups: Sequence[CacheGroup] = KEYS, ranks: int = 1, **storage: float | str
) -> AsyncGenerator[tuple[PageStoreUser, list[Running[KvStorageService]]]]:
    """A worker and the nodes that it knows."""
    broker = MemoryBroker()
    settings = replace(QUICK, kv_storage=replace(KvStorageConfig(), **storage))
    async with AsyncExitStack() as stack:
        started = [
            await stack.enter_async_context(
                running(
                    KvStorageService,
                    MemoryTransport(broker),
                    settings=settings,
                    instance=f"kv_storage-{number}",
                )
            )
            for number in range(nodes)
        ]
        worker = await stack.enter_async_context(
            running(PageStoreUsers(groups, ranks), MemoryTransport(broker), settings=settings)
        )
        client = worker.service.client
        await until(lambda: len(client._nodes) == nodes)
        worker.service.fill(1)
        yield worker.service, started
