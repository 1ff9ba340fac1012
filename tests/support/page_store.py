"""A worker as far as kv_storage sees one: pages of real pools, saved and fetched by its client."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from typing import TYPE_CHECKING

import torch
from msgspec.structs import replace
from tests.support.memory_bus import MemoryBroker, MemoryTransport
from tests.support.services import QUICK, Running, running
from tests.support.wait import until

from antiphon.config.settings import KvStorageConfig
from antiphon.kv_storage.service import KvStorageService
from antiphon.model_worker.batching.page_transfers import BlockTransfer, TransferDone
from antiphon.model_worker.cache.codec import PageCodec
from antiphon.model_worker.cache.groups import CacheGroup, CacheTensor, GroupKind
from antiphon.model_worker.protocol.page_store import KvStorageClient
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
    """The service of `PageStoreUsers`: one client, and the memory that it copies from and to."""

    def __init__(
        self,
        client: KvStorageClient,
        memories: Sequence[GroupMemory],
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
        for memory in self.memories:
            generator = torch.Generator().manual_seed(seed)
            shape = memory.data.shape
            memory.data.copy_(torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator))

    def content(self, block: BlockPages) -> list[bytes]:
        """The bytes of the pages of a block, by group."""
        contents: list[bytes] = []
        for memory, pages in zip(self.memories, block, strict=True):
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
    """The factory of a `PageStoreUser` with these cache groups."""

    role = Role.WORKER

    def __init__(self, groups: Sequence[CacheGroup]) -> None:
        self._groups = groups

    @asynccontextmanager
    async def lifespan(self, runtime: Runtime) -> AsyncGenerator[PageStoreUser]:
        memories = [GroupMemory(group, torch.device("cpu")) for group in self._groups]
        codec, landed = PageCodec(self._groups, memories), asyncio.Queue[TransferDone]()
        async with KvStorageClient.lifespan(runtime, codec, landed.put_nowait) as client:
            yield PageStoreUser(client, memories, landed, runtime)


@asynccontextmanager
async def cluster(
    nodes: int = 1, groups: Sequence[CacheGroup] = KEYS, **storage: float | str
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
            running(PageStoreUsers(groups), MemoryTransport(broker), settings=settings)
        )
        client = worker.service.client
        await until(lambda: len(client._nodes) == nodes)
        worker.service.fill(1)
        yield worker.service, started
