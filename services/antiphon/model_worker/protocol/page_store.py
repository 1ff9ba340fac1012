"""The worker's side of kv_storage: copies blocks of pages to its nodes, and fetches them.

The batching loop calls `save` and `fetch`, which return at once. Calls to the nodes are made in the
event loop; bytes are copied, hashed and received in threads. Whatever goes wrong is a miss, or a
block that is not stored: nothing here fails a request.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from antiphon.model_worker.batching.page_transfers import BlockTransfer, TransferDone
from antiphon.model_worker.cache.codec import RecordInvalid, UsableBlocks
from antiphon.service.startup import address_for_others, bind
from antiphon.telemetry import catalog
from antiphon.transfer.blobs import BlobServer, BlobStore
from antiphon.transfer.checksums import page_checksum
from antiphon.transfer.stream import stream_blobs
from antiphon.wire.base import Role
from antiphon.wire.claim import (
    Claim,
    GetPages,
    PageOffer,
    PagesLeased,
    PagesStored,
    PutPages,
    ReleaseLease,
)
from antiphon.wire.errors import EngineError
from antiphon.wire.ids import RequestId
from antiphon.wire.namespaces import stored_name
from antiphon.wire.routes import KV_CONTROL

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from antiphon.model_worker.cache.codec import PageCodec
    from antiphon.service.peers import Peer, PeerChange
    from antiphon.service.service import Runtime
    from antiphon.wire.base import Process
    from antiphon.wire.ids import InstanceId

log = logging.getLogger(__name__)

PUT_TIMEOUT_S = 10.0
PUT_BLOCKS_MAX = 32
"""Blocks of one call: their bytes are in memory twice until the node has them."""
FETCHES_MAX = 4
"""Transfers that are received at once; further ones wait for their turn."""
KNOWN_MAX = 65_536
"""Names of blocks that nodes are known to have."""


class KvStorageClient:
    """Blocks of pages in kv_storage, as the batching loop's `BlockStore`.

    Chains stay together: all blocks of one go to the node that the rendezvous hash of its first
    block chooses, since a node keeps a block only where it has the one before it.
    """

    def __init__(
        self,
        runtime: Runtime,
        codec: PageCodec,
        shelf: BlobStore,
        land: Callable[[TransferDone], None],
    ) -> None:
        self._runtime = runtime
        self._codec = codec
        self._shelf = shelf
        self._land = land
        self._metrics = PageStoreMetrics(runtime)
        self._event_loop = asyncio.get_running_loop()
        self._nodes: tuple[InstanceId, ...] = ()
        self._processes: Sequence[Process] = ()
        self._known = OrderedDict[bytes, None]()
        self._saves = asyncio.Queue[BlockTransfer]()
        self._fetching = asyncio.Semaphore(FETCHES_MAX)
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="page-save")
        self._fetcher = ThreadPoolExecutor(FETCHES_MAX, thread_name_prefix="page-fetch")

    @staticmethod
    @asynccontextmanager
    async def lifespan(
        runtime: Runtime, codec: PageCodec, land: Callable[[TransferDone], None]
    ) -> AsyncGenerator[KvStorageClient]:
        """Serve the blocks that nodes fetch, while this is entered."""
        config = runtime.settings.cache
        bound = bind(config.host, config.port)
        address = address_for_others(bound, config.host, config.advertise_host)
        shelf = BlobStore(address, config.save_bytes_max, runtime.clock.unix_ms)
        client = KvStorageClient(runtime, codec, shelf, land)
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
        self._event_loop.call_soon_threadsafe(self._saves.put_nowait, transfer)

    def fetch(self, transfer: BlockTransfer) -> None:
        self._event_loop.call_soon_threadsafe(self._begin_fetch, transfer)

    # To a node.

    async def _save_all(self) -> None:
        while True:
            transfer = await self._saves.get()
            landed = False
            try:
                names = self._names(transfer)
                missing = [
                    number
                    for number in range(transfer.first, len(names))
                    if names[number] not in self._known
                ]
                copies: list[tuple[int, bytearray, bytes]] = []
                if missing and self._nodes:
                    copies = await self._event_loop.run_in_executor(
                        self._saver, self._copy, transfer, names, missing
                    )
                self._land(TransferDone(number=transfer.number))
                landed = True
                for start in range(0, len(copies), PUT_BLOCKS_MAX):
                    if not await self._put(names, copies[start : start + PUT_BLOCKS_MAX]):
                        break  # the blocks after a missing one would be refused
            except EngineError as error:
                self._metrics.save_failed(error.code)
            except Exception:
                log.exception("blocks not saved")
                self._metrics.save_failed("internal")
            finally:
                if not landed:
                    self._land(TransferDone(number=transfer.number))

    def _copy(
        self, transfer: BlockTransfer, names: Sequence[bytes], numbers: Sequence[int]
    ) -> list[tuple[int, bytearray, bytes]]:
        """Number, bytes and checksum of these blocks; in a thread."""
        copies: list[tuple[int, bytearray, bytes]] = []
        for number in numbers:
            block = transfer.blocks[number - transfer.first]
            record = self._codec.encode(names[number], block)
            copies.append((number, record, page_checksum(record)))
        return copies

    async def _put(
        self, names: Sequence[bytes], copies: Sequence[tuple[int, bytearray, bytes]]
    ) -> bool:
        """Offer blocks to the node of their chain; whether it has all of them now."""
        node, now_ms = self._node(names[0]), self._runtime.clock.unix_ms()
        if node is None:
            return False
        offers: list[PageOffer] = []
        try:
            for number, record, checksum in copies:
                claim = self._shelf.put(record, PUT_TIMEOUT_S, checksum=checksum)
                parent = names[number - 1] if number else None
                offers.append(PageOffer(digest=names[number], parent=parent, claim=claim))
            reply = await self._runtime.bus.call(
                KV_CONTROL,
                PutPages(
                    pages=tuple(offers), deadline_unix_ms=now_ms + round(PUT_TIMEOUT_S * 1000)
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
            for name in names:
                self._known.pop(name, None)
        self._metrics.saved(len(reply.stored), len(offers) - len(reply.stored))
        return whole

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
        names = self._names(transfer)
        node, left_s = self._node(names[0]), due - self._runtime.clock.now()
        if node is None or left_s <= 0:
            return 0
        reply = await self._runtime.bus.call(
            KV_CONTROL,
            GetPages(
                request_id=RequestId(f"fetch-{transfer.number}"),
                chain=names[transfer.first :],
                lease_s=left_s,
            ),
            timeout_s=left_s,
            node=node,
        )
        assert isinstance(reply, PagesLeased), "the reply to a get"
        if not reply.claims:
            return 0
        most = self._codec.record_bytes_max
        claims = [claim for claim in reply.claims if claim.size_bytes <= most]
        if len(claims) < len(reply.claims):
            return 0  # these are no blocks of ours
        try:
            return await self._event_loop.run_in_executor(
                self._fetcher, self._receive, transfer, names, claims, due
            )
        finally:
            release = self._release(node, reply.lease)
            self._runtime.group.create_task(release, name="page-lease")

    def _receive(
        self,
        transfer: BlockTransfer,
        names: Sequence[bytes],
        claims: Sequence[Claim],
        due: float,
    ) -> int:
        """Receive, verify and write blocks, in a thread; how many are usable.

        A record is written only after it was verified as a whole, so that a page is what was saved
        or is not used.
        """
        usable = UsableBlocks(self._codec.groups, transfer.first)
        left_s = due - self._runtime.clock.now()
        if left_s <= 0:
            return 0
        blobs = stream_blobs(claims, timeout_s=left_s)
        try:
            rows = zip(names[transfer.first :], claims, transfer.blocks, blobs, strict=False)
            for name, claim, pages, record in rows:
                masks = self._codec.check(name, record, claim.digest)
                self._codec.decode(record, masks, pages, states=False)
                if usable.add(masks, pages):
                    self._codec.decode(record, masks, pages, states=True)
        except RecordInvalid as error:
            log.warning("block refused", extra={"reason": str(error)})
        return usable.count

    async def _release(self, node: InstanceId, lease: str) -> None:
        try:
            await self._runtime.bus.call(
                KV_CONTROL, ReleaseLease(lease=lease), timeout_s=1.0, node=node
            )
        except EngineError as error:
            log.debug("lease not released, it expires", extra={"error": error})

    # Nodes.

    def _names(self, transfer: BlockTransfer) -> tuple[bytes, ...]:
        """The names of all blocks of a chain."""
        return tuple(stored_name(transfer.namespace, digest) for digest in transfer.digests)

    def _node(self, root: bytes) -> InstanceId | None:
        """The node of a chain: the greatest hash of both names, so that few chains move with it."""
        return max(self._nodes, key=lambda node: rendezvous(node, root), default=None)

    def _on_peer(self, _: PeerChange, peer: Peer) -> None:
        if peer.heartbeat.role is Role.KV_STORAGE:
            self._find_nodes()

    def _find_nodes(self) -> None:
        peers = self._runtime.peers.accepting_work(Role.KV_STORAGE)
        processes = sorted(peer.process for peer in peers)
        if processes != self._processes:
            # A node that was restarted may have lost everything.
            self._processes = processes
            self._nodes = tuple(process.instance for process in processes)
            self._known.clear()


def rendezvous(node: InstanceId, root: bytes) -> bytes:
    return hashlib.sha256(node.encode() + b"\0" + root).digest()


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
