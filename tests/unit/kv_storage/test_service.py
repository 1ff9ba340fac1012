"""Pages are put, found, leased and fetched over the bus and real sockets; losing one is legal."""

from __future__ import annotations

import asyncio
import hashlib
import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace
from tests.support.memory_bus import MemoryBroker, MemoryTransport
from tests.support.services import QUICK, Running, client_bus, running

from antiphon.config.settings import KvStorageConfig
from antiphon.kv_storage.disk import HEADER_BYTES
from antiphon.kv_storage.service import KvStorageService
from antiphon.service.clock import SystemClock, deadline_in
from antiphon.service.startup import CannotStart, bind
from antiphon.transfer.blobs import BlobGone, BlobServer, BlobStore
from antiphon.transfer.checksums import page_checksum
from antiphon.transfer.stream import stream_blobs
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
from antiphon.wire.errors import InvalidRequest
from antiphon.wire.ids import new_request_id
from antiphon.wire.routes import KV_CONTROL

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncGenerator, Sequence
    from pathlib import Path

    from antiphon.bus.bus import Bus
    from antiphon.transfer.memory import PooledBlob
    from antiphon.wire.base import Message

CLOCK = SystemClock()
NODE = "kv_storage-0"
PAGE_BYTES = 1000


def pages_of(count: int, seed: int = 0, size: int = PAGE_BYTES) -> list[bytes]:
    chance = random.Random(seed)
    return [chance.randbytes(size) for _ in range(count)]


def chain_of(pages: Sequence[bytes]) -> tuple[bytes, ...]:
    """Name each page by all that leads to it."""
    digests: list[bytes] = []
    for page in pages:
        before = digests[-1] if digests else b""
        digests.append(hashlib.sha256(before + page).digest())
    return tuple(digests)


class Worker:
    """Serves pages for fetching, and calls a node to store and to lease them."""

    def __init__(self, bus: Bus, shelf: BlobStore, node: Running[KvStorageService]) -> None:
        self.bus = bus
        self.shelf = shelf
        self.node = node

    async def call(self, request: Message) -> Message:
        return await self.bus.call(KV_CONTROL, request, timeout_s=5, node=NODE)  # type: ignore[arg-type]

    def offer(self, pages: Sequence[bytes]) -> tuple[PageOffer, ...]:
        chain = chain_of(pages)
        parents = (None, *chain)
        return tuple(
            PageOffer(
                digest=digest,
                parent=parent,
                claim=self.shelf.put(page, 60, checksum=page_checksum(page)),
            )
            for digest, parent, page in zip(chain, parents, pages, strict=False)
        )

    async def put(self, offers: Sequence[PageOffer], within_s: float = 5) -> tuple[bytes, ...]:
        deadline = deadline_in(within_s, CLOCK)
        reply = await self.call(PutPages(pages=tuple(offers), deadline_unix_ms=deadline))
        assert isinstance(reply, PagesStored)
        return reply.stored

    async def held(self, chain: tuple[bytes, ...]) -> int:
        reply = await self.call(LookupPages(chain=chain))
        assert isinstance(reply, PagesFound)
        return reply.pages

    async def lease(self, chain: tuple[bytes, ...], lease_s: float = 30) -> PagesLeased:
        reply = await self.call(GetPages(request_id=new_request_id(), chain=chain, lease_s=lease_s))
        assert isinstance(reply, PagesLeased)
        return reply

    async def release(self, lease: str, *, corrupt: bool = False) -> None:
        assert await self.call(ReleaseLease(lease=lease, corrupt=corrupt)) == LeaseReleased()


async def fetched(claims: Sequence[Claim]) -> list[bytes]:
    """Fetch pages as a worker does, and compare each with its checksum.

    Raises:
        BlobGone: Not all are there.
    """

    def receive() -> list[bytes]:
        return [bytes(page) for page in stream_blobs(claims, timeout_s=5)]

    pages = await asyncio.to_thread(receive)
    if len(pages) < len(claims):
        raise BlobGone("a page is not there")
    assert [page_checksum(page) for page in pages] == [claim.digest for claim in claims]
    return pages


@asynccontextmanager
async def shelf() -> AsyncGenerator[BlobStore]:
    with bind("127.0.0.1", 0) as bound:
        made = BlobStore(f"127.0.0.1:{bound.getsockname()[1]}", 10**7, CLOCK)
        async with asyncio.TaskGroup() as group:
            server = group.create_task(BlobServer(bound, made).run())
            yield made
            server.cancel()


@asynccontextmanager
async def node(**storage: float | str) -> AsyncGenerator[Worker]:
    broker = MemoryBroker()
    settings = replace(QUICK, kv_storage=replace(KvStorageConfig(), **storage))
    async with (
        running(KvStorageService, MemoryTransport(broker), settings=settings) as started,
        client_bus(MemoryTransport(broker)) as bus,
        shelf() as holder,
    ):
        yield Worker(bus, holder, started)


async def test_what_was_put_is_found_leased_and_fetched() -> None:
    pages = pages_of(5)
    chain = chain_of(pages)
    async with node() as worker:
        assert await worker.put(worker.offer(pages)) == chain
        assert await worker.held(chain) == 5
        leased = await worker.lease(chain)
        assert await fetched(leased.claims) == pages
        await worker.release(leased.lease)
        with pytest.raises(BlobGone):
            await fetched(leased.claims)
        assert await worker.held(chain) == 5


async def test_the_longest_prefix_is_what_two_chains_share() -> None:
    common, one, other = pages_of(3, 1), pages_of(2, 2), pages_of(2, 3)
    async with node() as worker:
        await worker.put(worker.offer(common + one))
        assert await worker.held(chain_of(common + other)) == 3
        assert await worker.held(chain_of(other)) == 0
        leased = await worker.lease(chain_of(common + other))
        assert await fetched(leased.claims) == common
        assert (await worker.lease(chain_of(other))).claims == ()
        assert await worker.held(()) == 0


async def test_a_page_is_fetched_once_and_kept_under_its_digest() -> None:
    pages = pages_of(2)
    async with node() as worker:
        offers = worker.offer(pages)
        await worker.put(offers)
        gone = [replace(offer, claim=replace(offer.claim, token="00" * 16)) for offer in offers]
        assert await worker.put(gone) == chain_of(pages)


async def test_a_page_over_the_limit_is_left_and_so_is_what_follows_it() -> None:
    pages = [*pages_of(1), *pages_of(1, 1, PAGE_BYTES + 1), *pages_of(1, 2)]
    async with node(page_bytes_max=PAGE_BYTES) as worker:
        assert await worker.put(worker.offer(pages)) == chain_of(pages)[:1]
        assert await worker.held(chain_of(pages)) == 1


async def test_a_page_without_its_parent_could_never_be_found_and_is_left() -> None:
    pages = pages_of(4)
    chain = chain_of(pages)
    async with node() as worker:
        offers = worker.offer(pages)
        assert await worker.put([offers[0], offers[2]]) == chain[:1]
        assert await worker.put(offers[1:3]) == chain[1:3]
        assert await worker.held(chain) == 3


@pytest.mark.parametrize("on_disk", [False, True])
async def test_page_that_its_reader_finds_corrupt_goes_with_all_that_follow(
    on_disk: bool, tmp_path: Path
) -> None:
    pages = pages_of(4)
    chain = chain_of(pages)
    async with node(disk_path=str(tmp_path) if on_disk else "") as worker:
        offers = list(worker.offer(pages))
        wrong = replace(offers[1].claim, digest=offers[0].claim.digest)
        assert await worker.put([offers[0], replace(offers[1], claim=wrong), *offers[2:]]) == chain
        leased = await worker.lease(chain)
        with pytest.raises(AssertionError):
            await fetched(leased.claims)
        await worker.release(leased.lease)
        assert await worker.held(chain) == 4, "no reader has complained"
        leased = await worker.lease(chain)
        await worker.release(leased.lease, corrupt=True)
        assert await worker.held(chain) == 1
        assert await worker.put(offers) == chain
        leased = await worker.lease(chain)
        assert await fetched(leased.claims) == pages
        await worker.release(leased.lease, corrupt=True)
        assert await worker.held(chain) == 4, "what is sound stays, whatever a reader says"


async def test_a_holder_that_is_gone_costs_only_its_page() -> None:
    pages = pages_of(2)
    chain = chain_of(pages)
    async with node() as worker:
        first, second = worker.offer(pages)
        cut = replace(second, claim=replace(second.claim, size_bytes=PAGE_BYTES - 1))
        assert await worker.put([first, cut]) == chain[:1]
        unreachable = replace(second, claim=replace(second.claim, address="127.0.0.1:1"))
        assert await worker.put([unreachable]) == ()
        assert await worker.put([second], within_s=-1) == ()
        assert await worker.put([second]) == chain[1:]


async def test_a_malformed_claim_is_refused() -> None:
    async with node() as worker:
        (offer,) = worker.offer(pages_of(1))
        for wrong in ({"address": "nowhere"}, {"token": "not hexadecimal"}):
            with pytest.raises(InvalidRequest):
                await worker.put([replace(offer, claim=replace(offer.claim, **wrong))])


async def test_memory_holds_what_was_used_last_and_a_lease_holds_its_pages() -> None:
    old, new, newer = pages_of(2, 1), pages_of(2, 2), pages_of(2, 3)
    async with node(ram_bytes_max=4 * PAGE_BYTES) as worker:
        await worker.put(worker.offer(old))
        leased = await worker.lease(chain_of(old))
        await worker.put(worker.offer(new))
        assert await worker.put(worker.offer(newer)) == chain_of(newer)
        assert await worker.held(chain_of(new)) == 0
        assert await fetched(leased.claims) == old
        await worker.lease(chain_of(newer))
        assert await worker.put(worker.offer(new)) == (), "memory is full of leases"
        await worker.release(leased.lease)
        assert await worker.put(worker.offer(new)) == chain_of(new)


async def test_a_lease_ends_by_itself_and_none_outlasts_the_limit() -> None:
    pages = pages_of(1)
    async with node(lease_s_max=0.1, ram_bytes_max=PAGE_BYTES) as worker:
        await worker.put(worker.offer(pages))
        leased = await worker.lease(chain_of(pages), lease_s=600)
        (claim,) = leased.claims
        assert claim.expires_unix_ms <= CLOCK.unix_ms() + 100
        other = worker.offer(pages_of(1, 1))
        assert await worker.put(other) == ()
        async with asyncio.timeout(5):
            while await worker.put(other) == ():
                pass
        await worker.release(leased.lease)  # unknown by now, and no error
        await worker.release("never granted")


async def test_a_miss_leaves_no_lease_behind() -> None:
    async with node() as worker:
        report = worker.node.service.report
        await worker.lease(chain_of(pages_of(3)))
        assert report().load == 0
        await worker.put(worker.offer(pages_of(1)))
        leased = await worker.lease(chain_of(pages_of(3)))
        assert report().load == 1
        await worker.release(leased.lease)
        assert report().load == 0


async def test_everything_stored_survives_a_restart_where_there_is_a_disk(tmp_path: Path) -> None:
    pages = pages_of(6)
    chain = chain_of(pages)
    small = {"ram_bytes_max": 2 * PAGE_BYTES, "disk_path": str(tmp_path / "pages")}
    async with node(**small) as worker:
        assert await worker.put(worker.offer(pages)) == chain
        assert await worker.held(chain) == 6
    async with node(**small) as worker:
        assert await worker.held(chain) == 6
        leased = await worker.lease(chain)
        assert await fetched(leased.claims) == pages[:2], "as many as memory has room for"
        await worker.release(leased.lease)
        leased = await worker.lease(chain[2:])
        assert await fetched(leased.claims) == pages[2:4]
        more = pages_of(1, 7)
        named = (chain_of([*pages, *more])[-1], chain[-1])
        offer = worker.offer(more)[0]
        assert await worker.put([replace(offer, digest=named[0], parent=named[1])]) == named[:1]


async def test_a_page_that_went_bad_on_disk_is_a_miss_with_all_that_follow(tmp_path: Path) -> None:
    pages = pages_of(3)
    chain = chain_of(pages)
    async with node(ram_bytes_max=PAGE_BYTES, disk_path=str(tmp_path)) as worker:
        await worker.put(worker.offer(pages))
        leased = await worker.lease(chain[2:])  # now the others are on disk alone
        await worker.release(leased.lease)
        file = tmp_path / f"{chain[1].hex()}.page"
        file.write_bytes(file.read_bytes()[:-1] + b"?")
        assert (await worker.lease(chain[1:])).claims == ()
        assert await worker.held(chain) == 1
        assert await worker.put(worker.offer(pages)[2:]) == (), "nothing leads to it"
        assert await worker.put(worker.offer(pages)) == chain
        assert await worker.held(chain) == 3


async def test_a_disk_folder_that_cannot_be_made_keeps_it_from_starting(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ExceptionGroup) as caught:
        async with node(disk_path=str(file)):
            pass
    assert caught.group_contains(CannotStart, match=r"kv_storage\.disk_path: .*file: File exists")


@pytest.mark.parametrize("seed", range(8))
async def test_whatever_is_asked_at_a_time_what_is_leased_is_right(
    seed: int, tmp_path: Path
) -> None:
    """Puts, lookups and leases of a few chains beside each other, with hardly any memory."""
    chance = random.Random(seed)
    common = pages_of(2, 100)
    chains = [common[: chance.randrange(3)] + pages_of(4, n) for n in range(4)]

    async def use(worker: Worker) -> None:
        pages = chance.choice(chains)
        chain = chain_of(pages)
        if chance.random() < 0.5:
            stored = await worker.put(worker.offer(pages))
            assert set(stored) <= set(chain)
            return
        assert 0 <= await worker.held(chain) <= len(chain)
        leased = await worker.lease(chain)
        assert await fetched(leased.claims) == pages[: len(leased.claims)]
        await worker.release(leased.lease)

    disk = str(tmp_path) if seed % 2 else ""
    async with node(ram_bytes_max=5 * PAGE_BYTES, disk_path=disk) as worker:
        for _ in range(10):
            async with asyncio.TaskGroup() as group:
                for _ in range(6):
                    group.create_task(use(worker))
        # With every lease released, memory has room again.
        assert await worker.put(worker.offer(pages_of(5, 50))) == chain_of(pages_of(5, 50))


@pytest.mark.parametrize("tier", ["memory", "disk"])
async def test_end_of_a_chain_is_evicted_before_its_beginning(tier: str, tmp_path: Path) -> None:
    sizes: dict[str, float | str] = {"ram_bytes_max": 4 * PAGE_BYTES}
    if tier == "disk":  # memory holds none of them
        sizes = {"ram_bytes_max": 10, "disk_bytes_max": 4 * (PAGE_BYTES + HEADER_BYTES)}
        sizes["disk_path"] = str(tmp_path / "pages")
    old, new = pages_of(3, 1), pages_of(2, 2)
    async with node(**sizes) as worker:
        await worker.put(worker.offer(old))
        assert await worker.put(worker.offer(new)) == chain_of(new)
        assert await worker.held(chain_of(old)) == 2
        # A chain that is longer than the tier keeps its beginning, not its end.
        long = pages_of(6, 3)
        assert await worker.put(worker.offer(long)) == chain_of(long)[:4]
        assert await worker.held(chain_of(long)) == 4


async def test_pages_of_a_put_are_fetched_over_one_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connections = 0
    serve = BlobServer._serve

    def counted(self: BlobServer, connection: socket.socket) -> None:
        nonlocal connections
        connections += 1
        serve(self, connection)

    monkeypatch.setattr(BlobServer, "_serve", counted)
    pages = pages_of(20)
    async with node() as worker:
        assert await worker.put(worker.offer(pages)) == chain_of(pages)
    assert connections == 1


async def test_put_waits_for_the_pages_before_it_that_another_put_brings() -> None:
    pages = pages_of(6)
    async with node() as worker:
        service, offers = worker.node.service, worker.offer(pages)
        fetch, later_fetched = service._fetch, asyncio.Event()

        async def slow(offers: Sequence[PageOffer], due_at: float) -> dict[bytes, PooledBlob]:
            found = await fetch(offers, due_at)
            if offers[0].parent is not None:
                later_fetched.set()
            await later_fetched.wait()
            return found

        service._fetch = slow
        stored = await asyncio.gather(worker.put(offers[:3]), worker.put(offers[3:]))
        assert stored == [chain_of(pages)[:3], chain_of(pages)[3:]]
        assert not service._arrivals._arriving


async def test_put_is_refused_when_the_one_before_it_fails() -> None:
    pages = pages_of(6)
    async with node() as worker:
        offers = worker.offer(pages)
        worker.shelf.discard(offers[2].claim)
        stored = await asyncio.gather(worker.put(offers[:3]), worker.put(offers[3:]))
        assert stored == [chain_of(pages)[:2], ()]
        assert not worker.node.service._arrivals._arriving
