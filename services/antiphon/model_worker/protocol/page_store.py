"""The worker's side of kv_storage: copies blocks of pages to its nodes, and fetches them.

The batching loop calls `save` and `fetch`, which return at once. Calls to the nodes are made in the
event loop; bytes are copied, hashed and received in threads. Whatever goes wrong is a miss, or a
block that is not stored: nothing here fails a request.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from itertools import chain
from typing import TYPE_CHECKING

from antiphon.model_worker.batching.page_transfers import BlockTransfer, TransferDone
from antiphon.model_worker.protocol.rendezvous import rendezvous
from antiphon.model_worker.ranks.page_shards import FETCHES_MAX, FetchedBlocks
from antiphon.service.clock import deadline_in
from antiphon.service.startup import address_for_others, bind
from antiphon.service.tasks import gather
from antiphon.telemetry import catalog
from antiphon.transfer.blobs import BlobServer, BlobStore
from antiphon.wire.base import Role
from antiphon.wire.claim import (
    GetPages,
    PageOffer,
    PagesLeased,
    PagesStored,
    PutPages,
    ReleaseLease,
)
from antiphon.wire.errors import EngineError
from antiphon.wire.ids import RequestId
from antiphon.wire.routes import KV_CONTROL

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator, Sequence

    from antiphon.model_worker.ranks.page_shards import BlockRecord, WorkerShards
    from antiphon.service.peers import Peer, PeerChange
    from antiphon.service.service import Runtime
    from antiphon.wire.base import Process
    from antiphon.wire.ids import InstanceId

log = logging.getLogger(__name__)

PUT_TIMEOUT_S = 10.0
PUT_BYTES_MIN = 6 * 1024**2
PUT_BYTES_MAX = 18 * 1024**2
"""About how many bytes of records one call has. It costs as much as a megabyte of them."""
CALLS_MIN = 4
"""Calls of a save, unless they would be too small: nothing is sent while the first is copied."""
PUTS_MAX = 3
"""Calls whose records are in memory: one is copied while nodes fetch the others."""
SAVE_WAIT_S = 1.0
"""How long the pages of a transfer are held if nodes do not fetch what was copied before."""
KNOWN_MAX = 65_536
"""Names of blocks that nodes are known to have."""


class KvStorageClient:
    """Blocks of pages in kv_storage, as the batching loop's `BlockStore`.

    Chains stay together: all blocks of one go to the node that the rendezvous hash of its first
    block chooses, since a node keeps a block only where it has the one before it. With several
    ranks a block is as many records, in chains of their own: it is there if all of them are.
    """

    def __init__(
        self,
        runtime: Runtime,
        shards: WorkerShards,
        shelf: BlobStore,
        land: Callable[[TransferDone], None],
    ) -> None:
        self._runtime = runtime
        self._shards = shards
        self._shelf = shelf
        self._land = land
        self._metrics = PageStoreMetrics(runtime)
        self._event_loop = asyncio.get_running_loop()
        self._nodes: list[Process] = []
        self._known = OrderedDict[bytes, None]()
        self._saves = asyncio.Queue[tuple[BlockTransfer, float]]()
        self._putting = set[bytes]()
        record_bytes = shards.ranks * shards.record_bytes_max
        bytes_max = min(PUT_BYTES_MAX, runtime.settings.cache.save_bytes_max // PUTS_MAX)
        self._put_blocks = max(1, bytes_max // record_bytes)
        self._put_blocks_min = max(1, PUT_BYTES_MIN // record_bytes)
        # Memory that was touched before: the first time takes longer than all else of a save.
        self._memories = asyncio.Queue[memoryview]()
        self._memories_made = 0
        self._fetching = asyncio.Semaphore(FETCHES_MAX)
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="page-save")
        self._fetcher = ThreadPoolExecutor(FETCHES_MAX, thread_name_prefix="page-fetch")

    @staticmethod
    @asynccontextmanager
    async def lifespan(
        runtime: Runtime, shards: WorkerShards, land: Callable[[TransferDone], None]
    ) -> AsyncGenerator[KvStorageClient]:
        """Serve the blocks that nodes fetch, while this is entered."""
        config = runtime.settings.cache
        bound = bind(config.host, config.port)
        address = address_for_others(bound, config.host, config.advertise_host)
        shelf = BlobStore(address, config.save_bytes_max, runtime.clock)
        client = KvStorageClient(runtime, shards, shelf, land)
        with ExitStack() as stack:
            stack.enter_context(bound)
            for thread in (client._saver, client._fetcher):
                stack.callback(thread.shutdown, wait=False, cancel_futures=True)
            tasks = [
                runtime.group.create_task(BlobServer(bound, shelf).run(), name="blocks"),
                runtime.group.create_task(client._save_all(), name="page-save"),
            ]
            runtime.peers.watch(client._on_peer)
            client._find_nodes()
            try:
                yield client
            finally:
                for task in tasks:
                    task.cancel()

    # The batching loop's side.

    @property
    def available(self) -> bool:
        return bool(self._nodes)

    def save(self, transfer: BlockTransfer) -> None:
        self._event_loop.call_soon_threadsafe(self._begin_save, transfer)

    def fetch(self, transfer: BlockTransfer) -> None:
        self._event_loop.call_soon_threadsafe(self._begin_fetch, transfer)

    # To a node.

    def _begin_save(self, transfer: BlockTransfer) -> None:
        self._saves.put_nowait((transfer, self._runtime.clock.now() + SAVE_WAIT_S))

    async def _save_all(self) -> None:
        """Copy what is to be saved, while nodes fetch what was copied before."""
        async with asyncio.TaskGroup() as puts:
            while True:
                await self._save(*await self._saves.get(), puts)

    async def _save(self, transfer: BlockTransfer, due: float, puts: asyncio.TaskGroup) -> None:
        """Copy the blocks that no node is known to have, a call's worth at a time.

        Blocks for whose copies there is no memory until `due` are not stored.
        """
        refused = asyncio.Event()
        memory: memoryview | None = None
        try:
            names = self._shards.names(transfer)
            missing = self._missing(transfer, names)
            for blocks in self._calls(missing):
                memory = await self._memory_until(due)
                if refused.is_set() or not self._nodes:
                    break  # the blocks after a missing one would be refused
                copies = await self._event_loop.run_in_executor(
                    self._saver,
                    self._shards.copy,
                    transfer,
                    blocks,
                    memory,
                )
                put = self._put_copies(names, copies, memory, refused)
                memory = None
                puts.create_task(put, name="page-put")
        except TimeoutError:
            self._metrics.save_failed("late")
        except Exception:
            log.exception("blocks not saved")
            self._metrics.save_failed("internal")
        finally:
            if memory is not None:
                self._memories.put_nowait(memory)
            self._land(TransferDone(number=transfer.number))

    def _missing(self, transfer: BlockTransfer, names: Sequence[Sequence[bytes]]) -> list[int]:
        """The blocks of a transfer that no node has, nor is about to fetch."""
        if not self._nodes:
            return []
        blocks = range(transfer.first, len(transfer.digests))
        return [block for block in blocks if not all(self._is_saved(own[block]) for own in names)]

    def _calls(self, blocks: Sequence[int]) -> Iterator[Sequence[int]]:
        """Parts of blocks, one a call: a quarter, so that few wait for the first to be copied."""
        count = -(-len(blocks) // CALLS_MIN)
        count = min(self._put_blocks, max(self._put_blocks_min, count))
        return (blocks[start : start + count] for start in range(0, len(blocks), count))

    def _is_saved(self, name: bytes) -> bool:
        return name in self._known or name in self._putting

    async def _memory_until(self, due: float) -> memoryview:
        """Memory for the records of one call, that no other one uses; raises `TimeoutError`."""
        if self._memories.empty() and self._memories_made < PUTS_MAX:
            self._memories_made += 1
            blocks = self._put_blocks * self._shards.ranks
            return memoryview(bytearray(blocks * self._shards.record_bytes_max))
        async with asyncio.timeout(max(0.0, due - self._runtime.clock.now())):
            return await self._memories.get()

    async def _put_copies(
        self,
        names: Sequence[Sequence[bytes]],
        copies: Sequence[Sequence[BlockRecord]],
        memory: memoryview,
        refused: asyncio.Event,
    ) -> None:
        """Offer copies of blocks, and free their memory; a put that was not whole is `refused`."""
        moving = {own[r.block] for own, rs in zip(names, copies, strict=True) for r in rs}
        self._putting |= moving
        try:
            if not refused.is_set() and await self._put(names, copies):
                return
        except EngineError as error:
            self._metrics.save_failed(error.code)
        except Exception:
            log.exception("blocks not saved")
            self._metrics.save_failed("internal")
        finally:
            self._putting -= moving
            self._memories.put_nowait(memory)
        refused.set()

    async def _put(
        self, names: Sequence[Sequence[bytes]], copies: Sequence[Sequence[BlockRecord]]
    ) -> bool:
        """Offer blocks, by rank, to the node of their chain; whether it has all of them now."""
        node = self._node(names)
        if node is None:
            return False
        offers: list[PageOffer] = []
        try:
            for own, records in zip(names, copies, strict=True):
                for record in records:
                    block, checksum = record.block, record.checksum
                    claim = self._shelf.put(record.data, PUT_TIMEOUT_S, checksum=checksum)
                    parent = own[block - 1] if block else None
                    offers.append(PageOffer(digest=own[block], parent=parent, claim=claim))
            reply = await self._runtime.bus.call(
                KV_CONTROL,
                PutPages(
                    pages=tuple(offers),
                    deadline_unix_ms=deadline_in(PUT_TIMEOUT_S, self._runtime.clock),
                    left_ms=round(PUT_TIMEOUT_S * 1000),
                ),
                timeout_s=PUT_TIMEOUT_S,
                node=node,
            )
        finally:
            for offer in offers:
                self._shelf.discard(offer.claim)
        assert isinstance(reply, PagesStored), "the reply to a put"
        for name in reply.stored:
            self._known[name] = None
        while len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)
        whole = len(reply.stored) == len(offers)
        if not whole:
            # The node has lost what is known of this chain: the next request offers all of it.
            self._forget(names)
        self._metrics.saved(len(reply.stored), len(offers) - len(reply.stored))
        return whole

    def _forget(self, names: Sequence[Sequence[bytes]]) -> None:
        for name in chain.from_iterable(names):
            self._known.pop(name, None)

    # From a node.

    def _begin_fetch(self, transfer: BlockTransfer) -> None:
        self._runtime.group.create_task(self._fetch(transfer), name="page-fetch")

    async def _fetch(self, transfer: BlockTransfer) -> None:
        due = self._runtime.clock.now() + transfer.timeout_s
        blocks = 0
        try:
            async with self._fetching:
                blocks = await self._fetched(transfer, due)
        except EngineError as error:
            log.info("blocks not fetched", extra={"error": error})
        except Exception:
            log.exception("blocks not fetched")
        finally:
            self._metrics.fetched(blocks, len(transfer.blocks) - blocks)
            self._land(TransferDone(number=transfer.number, blocks=blocks))

    async def _fetched(self, transfer: BlockTransfer, due: float) -> int:
        """Fetch what the node of the chain has of these blocks; how many are usable."""
        names = self._shards.names(transfer)
        node, left_s = self._node(names), due - self._runtime.clock.now()
        if node is None or left_s <= 0:
            return 0
        request_id = RequestId(f"fetch-{transfer.number}")
        # If one call fails, the other leases expire.
        replies = await gather(
            [
                self._lease(
                    node,
                    GetPages(request_id=request_id, chain=own[transfer.first :], lease_s=left_s),
                )
                for own in names
            ]
        )
        # A block is there if all its shards are.
        count = min(len(reply.claims) for reply in replies)
        fetched = FetchedBlocks(0)
        try:
            left_s = due - self._runtime.clock.now()
            if not count or left_s <= 0:
                return 0
            claims = [reply.claims[:count] for reply in replies]
            fetched = await self._event_loop.run_in_executor(
                self._fetcher, self._shards.fetch, transfer, claims, left_s
            )
            return fetched.usable
        finally:
            if fetched.refused:
                # The node drops what is corrupt, with all that follows it: it is offered again.
                self._forget(names)
            for reply in replies:
                if reply.claims:
                    release = self._release(node, reply.lease, corrupt=fetched.refused)
                    self._runtime.group.create_task(release, name="page-lease")

    async def _lease(self, node: InstanceId, request: GetPages) -> PagesLeased:
        reply = await self._runtime.bus.call(
            KV_CONTROL, request, timeout_s=request.lease_s, node=node
        )
        assert isinstance(reply, PagesLeased), "the reply to a get"
        return reply

    async def _release(self, node: InstanceId, lease: str, *, corrupt: bool) -> None:
        request = ReleaseLease(lease=lease, corrupt=corrupt)
        try:
            await self._runtime.bus.call(KV_CONTROL, request, timeout_s=1.0, node=node)
        except EngineError as error:
            log.debug("lease not released, it expires", extra={"error": error})

    # Nodes.

    def _node(self, names: Sequence[Sequence[bytes]]) -> InstanceId | None:
        """The node of a chain: the greatest hash of both names, so that few chains move with it.

        That of the first rank's shard is that of all.
        """
        root = names[0][0]
        instances = (process.instance for process in self._nodes)
        return max(instances, key=lambda node: rendezvous(node, root), default=None)

    def _on_peer(self, _: PeerChange, peer: Peer) -> None:
        if peer.heartbeat.role is Role.KV_STORAGE:
            self._find_nodes()

    def _find_nodes(self) -> None:
        peers = self._runtime.peers.accepting_work(Role.KV_STORAGE)
        nodes = sorted(peer.process for peer in peers)
        if nodes != self._nodes:
            # A node that was restarted may have lost everything.
            self._nodes = nodes
            self._known.clear()


class PageStoreMetrics:
    """Counts of blocks by what has become of them."""

    def __init__(self, runtime: Runtime) -> None:
        self._saves = runtime.metrics.counter(catalog.SAVED_BLOCKS)
        self._fetches = runtime.metrics.counter(catalog.FETCHED_BLOCKS)

    def saved(self, stored: int, refused: int) -> None:
        self._saves.labels("stored").inc(stored)
        self._saves.labels("refused").inc(refused)

    def save_failed(self, reason: str) -> None:
        self._saves.labels(reason).inc()

    def fetched(self, found: int, missed: int) -> None:
        self._fetches.labels("found").inc(found)
        self._fetches.labels("missed").inc(missed)
