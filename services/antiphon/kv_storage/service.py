"""Connects the page store to the bus and to the blob server."""

from __future__ import annotations

import asyncio
import hmac
import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from antiphon.kv_storage.disk import DiskTier
from antiphon.kv_storage.pages import Page
from antiphon.kv_storage.store import MemoryTier, PageStore
from antiphon.service.clock import deadline_in, time_left_s
from antiphon.service.endpoint import Endpoint, RequestEndpoint
from antiphon.service.service import Report, Runtime
from antiphon.service.startup import CannotStart, address_for_others, bind
from antiphon.service.tasks import repeat
from antiphon.transfer.blobs import BlobServer, new_token
from antiphon.transfer.checksums import page_checksum
from antiphon.transfer.memory import ChunkPool
from antiphon.transfer.stream import receive_blobs
from antiphon.wire.base import Role
from antiphon.wire.claim import (
    Claim,
    GetPages,
    LeaseReleased,
    LookupPages,
    PageOffer,
    PagesFound,
    PagesLeased,
    PagesStored,
    PutPages,
    ReleaseLease,
)
from antiphon.wire.codec import split_rows
from antiphon.wire.routes import KV_CONTROL

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence

    from antiphon.config.settings import KvStorageConfig
    from antiphon.service.clock import Clock
    from antiphon.transfer.memory import BlobData, PooledBlob
    from antiphon.wire.ids import ModelName

log = logging.getLogger(__name__)

SWEEP_S = 1.0
RECEIVERS = 4
"""Puts whose pages are received at once."""
BATCH_BYTES = 64 * 1024**2
"""About how many bytes of one put are in memory outside the tiers."""
RESERVE_BYTES = 64 * 1024**2
"""Memory that is made ready ahead of puts, until so much of it goes around as there may be."""

Request = PutPages | LookupPages | GetPages | ReleaseLease
Reply = PagesStored | PagesFound | PagesLeased | LeaseReleased


class KvStorageService:
    """Puts, looks up, leases and releases pages; bytes travel by claim check."""

    role: ClassVar = Role.KV_STORAGE

    def __init__(
        self,
        runtime: Runtime,
        address: str,
        store: PageStore,
        leases: Leases,
        pool: ChunkPool,
        receiver: ThreadPoolExecutor,
    ) -> None:
        self._runtime = runtime
        self._clock = runtime.clock
        self._config = runtime.settings.kv_storage
        self._address = address
        self._store = store
        self._leases = leases
        self._pool = pool
        self._arrivals = ArrivingPages()
        self._receiver = receiver

    @staticmethod
    @asynccontextmanager
    async def lifespan(runtime: Runtime) -> AsyncGenerator[KvStorageService]:
        config = runtime.settings.kv_storage
        bound = bind(config.host, config.port)
        address = address_for_others(bound, config.host, config.advertise_host)
        with (
            bound,
            ThreadPoolExecutor(1, thread_name_prefix="disk") as thread,
            ThreadPoolExecutor(RECEIVERS, thread_name_prefix="receive") as receiver,
        ):
            pool = ChunkPool(min(RESERVE_BYTES, config.ram_bytes_max))
            disk = await asyncio.to_thread(_open_disk, config, pool)
            memory = MemoryTier(config.ram_bytes_max, over_disk=disk is not None)
            leases = Leases(memory, runtime.clock)
            store = PageStore(memory, disk, thread)
            service = KvStorageService(runtime, address, store, leases, pool, receiver)
            runtime.group.create_task(BlobServer(bound, leases).run())
            runtime.group.create_task(repeat(leases.sweep, SWEEP_S))
            yield service

    def endpoints(self) -> Sequence[Endpoint]:
        here = {"node": self._runtime.process.instance}
        return (RequestEndpoint(route=KV_CONTROL, handler=self._control, address=here),)

    def model(self) -> ModelName | None:
        """None: it stores pages of any model, which differ by their digests."""
        return None

    def report(self) -> Report:
        return Report(load=len(self._leases))

    async def drain(self) -> None:
        """Do nothing: a failed fetch is a miss, which is always allowed."""

    async def _control(self, request: Request, _: object) -> Reply:
        match request:
            case PutPages():
                return await self._put(request)
            case LookupPages(chain=chain):
                return PagesFound(pages=self._store.prefix_length(chain))
            case GetPages():
                return await self._get(request)
            case ReleaseLease(lease=lease, corrupt=corrupt):
                pages = self._leases.release(lease)
                if corrupt:
                    await self._drop_corrupt(pages)
                return LeaseReleased()

    async def _put(self, request: PutPages) -> PagesStored:
        """Fetch missing pages. A page without its predecessor could never be found."""
        stored: list[bytes] = []
        due_at = self._clock.now() + time_left_s(request, self._clock)
        with self._arrivals.of(offer.digest for offer in request.pages) as arriving:
            for offers in split_rows(request.pages, attrgetter("claim.size_bytes"), BATCH_BYTES):
                missing = [offer for offer in offers if offer.digest not in self._store]
                fetched = await self._fetch(missing, due_at)
                for offer in offers:
                    if offer.parent is not None and offer.parent not in self._store:
                        await arriving.wait(offer.parent, due_at - self._clock.now())
                    if await self._store_page(offer, fetched):
                        stored.append(offer.digest)
                    arriving.end(offer.digest)
        await self._store.touch(stored)
        if self._pool.short:
            self._receiver.submit(self._pool.fill)
        return PagesStored(stored=tuple(stored))

    async def _store_page(self, offer: PageOffer, fetched: Mapping[bytes, PooledBlob]) -> bool:
        if offer.digest in self._store:
            return True
        if (data := fetched.get(offer.digest)) is None:
            return False
        page = Page(offer.digest, offer.parent, data, offer.claim.digest)
        return await self._store.put(page)

    async def _fetch(self, offers: Sequence[PageOffer], due_at: float) -> dict[bytes, PooledBlob]:
        """Fetch pages over one connection per address; unavailable ones are left out."""
        bus_loop = asyncio.get_running_loop()
        bytes_max = self._config.page_bytes_max
        by_address: dict[str, list[PageOffer]] = {}
        for offer in offers:
            by_address.setdefault(offer.claim.address, []).append(offer)
        fetched: dict[bytes, PooledBlob] = {}
        for group in by_address.values():
            wanted = [offer for offer in group if offer.claim.size_bytes <= bytes_max]
            while wanted and (left_s := due_at - self._clock.now()) > 0:
                got = await bus_loop.run_in_executor(
                    self._receiver, _receive, wanted, self._pool, left_s
                )
                fetched |= dict(zip([offer.digest for offer in wanted], got, strict=False))
                # The page after the fetched ones is unavailable; later ones may be available.
                wanted = wanted[len(got) + 1 :]
        return fetched

    async def _drop_corrupt(self, pages: Sequence[Page]) -> None:
        """Verify pages, since a reader could not, and drop those that are damaged."""
        bus_loop = asyncio.get_running_loop()
        for page in await bus_loop.run_in_executor(self._receiver, _corrupt, pages):
            log.warning("page corrupt", extra={"digest": page.digest.hex()})
            await self._store.drop(page)

    async def _get(self, request: GetPages) -> PagesLeased:
        lease_s = min(request.lease_s, self._config.lease_s_max)
        lease, expires_unix_ms = self._leases.grant(lease_s), deadline_in(lease_s, self._clock)
        for digest in request.chain:
            page = await self._store.load(digest)
            if page is None:
                break
            self._leases.add(lease, page)
        await self._store.touch([page.digest for page in lease.pages.values()])
        if not lease.pages:
            # A miss pins no pages, and its caller need not release the lease.
            self._leases.release(lease.name)
        claims = tuple(
            Claim(
                address=self._address,
                token=token,
                size_bytes=len(page.data),
                digest=page.checksum,
                expires_unix_ms=expires_unix_ms,
            )
            for token, page in lease.pages.items()
        )
        return PagesLeased(lease=lease.name, claims=claims)


def _receive(offers: Sequence[PageOffer], pool: ChunkPool, timeout_s: float) -> list[PooledBlob]:
    """Fetch pages of one address, up to the first one that is unavailable.

    They are not verified: a reader must do that in any case, and finds what changes later, too.
    """
    return list(receive_blobs([offer.claim for offer in offers], pool, timeout_s=timeout_s))


def _corrupt(pages: Sequence[Page]) -> list[Page]:
    return [
        page for page in pages if not hmac.compare_digest(page_checksum(page.data), page.checksum)
    ]


def _open_disk(config: KvStorageConfig, pool: ChunkPool) -> DiskTier | None:
    if not config.disk_path:
        return None
    try:
        return DiskTier(Path(config.disk_path).expanduser(), config.disk_bytes_max, pool)
    except OSError as error:
        raise CannotStart(f"kv_storage.disk_path: {config.disk_path}: {error.strerror}") from error


class ArrivingPages:
    """Pages that puts are about to store: a put with the pages after them waits for them."""

    def __init__(self) -> None:
        self._arriving: dict[bytes, asyncio.Future[None]] = {}

    @contextmanager
    def of(self, digests: Iterable[bytes]) -> Generator[ArrivingPut]:
        """The pages of one put, which ends with the context."""
        new = [digest for digest in digests if digest not in self._arriving]
        arrival = ArrivingPut(self._arriving, new)
        try:
            yield arrival
        finally:
            for digest in new:
                arrival.end(digest)


class ArrivingPut:
    """The pages of one put, beside those of others."""

    def __init__(self, arriving: dict[bytes, asyncio.Future[None]], own: Sequence[bytes]) -> None:
        self._arriving = arriving
        self._own = dict.fromkeys(own)
        loop = asyncio.get_running_loop()
        arriving.update((digest, loop.create_future()) for digest in self._own)

    async def wait(self, digest: bytes, timeout_s: float) -> None:
        """Wait until another put has stored a page, or has not."""
        arriving = self._arriving.get(digest)
        if arriving is not None and digest not in self._own:
            await asyncio.wait([arriving], timeout=max(0.0, timeout_s))

    def end(self, digest: bytes) -> None:
        """A page of this put is stored, or will not be."""
        if digest in self._own:
            del self._own[digest]
            self._arriving.pop(digest).set_result(None)


@dataclass(frozen=True, slots=True)
class Lease:
    """Pinned pages by fetch token, in the order of their chain."""

    name: str
    expires_at: float
    pages: dict[str, Page] = field(default_factory=dict[str, Page])


class Leases:
    """All leases of a node; the source of the blob server, where a token names a leased page."""

    def __init__(self, memory: MemoryTier, clock: Clock) -> None:
        self._memory = memory
        self._clock = clock
        self._leases: dict[str, Lease] = {}
        self._data: dict[str, BlobData] = {}  # by token

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, lease_s: float) -> Lease:
        lease = Lease(new_token(), self._clock.now() + lease_s)
        self._leases[lease.name] = lease
        return lease

    def add(self, lease: Lease, page: Page) -> None:
        """Pin a page that is in memory, before loading the next one could evict it."""
        if lease.name not in self._leases:
            return  # it expired while a page was loaded
        self._memory.pin(page.digest)
        token = new_token()
        lease.pages[token] = page
        self._data[token] = page.data

    def release(self, name: str) -> Sequence[Page]:
        """End a lease  ->  its pages; none of an unknown one."""
        if (lease := self._leases.pop(name, None)) is None:
            return ()
        for token, page in lease.pages.items():
            del self._data[token]
            self._memory.unpin(page.digest)
        return tuple(lease.pages.values())

    def sweep(self) -> None:
        now = self._clock.now()
        for name in [n for n, lease in self._leases.items() if lease.expires_at < now]:
            self.release(name)

    def get(self, token: str) -> BlobData | None:
        return self._data.get(token)
