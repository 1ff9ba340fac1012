"""Room for media is taken before their bytes come, and given back whatever comes of them."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from tests.support.clock import ManualClock
from tests.support.llava import picture
from tests.support.wait import until

from antiphon.config.gateway import MediaConfig
from antiphon.config.settings import EncoderConfig
from antiphon.gateway.media import room
from antiphon.gateway.media.intake import LINGER_S, MediaIntake
from antiphon.gateway.media.room import RequestRoom
from antiphon.gateway.requests.generation_request import MediumSource
from antiphon.transfer.blobs import BlobStore
from antiphon.wire.errors import InvalidRequest, Overloaded
from antiphon.wire.ids import TenantId

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from antiphon.gateway.media.stored import HeldMedia, SharedMedia

IMAGE = picture(1)
SIZE = len(IMAGE)
LARGEST = 2 * SIZE
"""Of an image."""
STEP = 1024**2


class Server:
    """Sends a picture under any name, its second half once it is let.

    Under `/unknown...` it does not say how long it is, under `/broken...` it ends in the middle.
    """

    def __init__(self, body: bytes = IMAGE) -> None:
        self.body = body
        self.asked = list[str]()
        self.lets = asyncio.Event()

    async def send(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path)
        response = web.StreamResponse()
        if not request.path.startswith("/unknown"):
            response.content_length = len(self.body)
        await response.prepare(request)
        await response.write(self.body[:10])
        await self.lets.wait()
        if request.path.startswith("/broken"):
            assert request.transport is not None
            request.transport.close()
        else:
            await response.write(self.body[10:])
        return response


class Gateway:
    def __init__(
        self, store: BlobStore, clock: ManualClock, intake: MediaIntake, port: int
    ) -> None:
        self.store = store
        self.clock = clock
        self._intake = intake
        self._at = f"http://localhost:{port}"

    def sources(self, *paths: str) -> list[MediumSource]:
        return [
            MediumSource(self._at + path, path, video=path.startswith("/video")) for path in paths
        ]

    def shared(self, *prompts: str) -> SharedMedia:
        return self._intake.shared([self.sources(path) for path in prompts])

    async def open(
        self, *paths: str, tenant: str = "acme", shared: SharedMedia | None = None
    ) -> HeldMedia:
        sources, of = self.sources(*paths), TenantId(tenant)
        return await self._intake.open(sources, 9.0, tenant=of, shared=shared)


@asynccontextmanager
async def gateway(server: Server, bytes_max: int, **config: Any) -> AsyncGenerator[Gateway]:
    app = web.Application()
    app.add_routes([web.get("/{name}", server.send)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    clock = ManualClock()
    store = BlobStore("a:1", bytes_max, clock)
    media = MediaConfig(**{"allowed_domains": "localhost", "file_bytes_max": LARGEST, **config})
    intake = MediaIntake(media, store, EncoderConfig())
    try:
        yield Gateway(store, clock, intake, runner.addresses[0][1])
    finally:
        await intake.close()
        await runner.cleanup()
    assert store.bytes_held == 0


@pytest.mark.parametrize(("path", "reserved"), [("/a", SIZE), ("/unknown", LARGEST)])
async def test_a_fetch_takes_what_is_announced_or_the_next_bytes_at_most(
    path: str, reserved: int
) -> None:
    server = Server()
    async with gateway(server, LARGEST) as at, asyncio.TaskGroup() as group:
        opening = group.create_task(at.open(path))
        await until(lambda: at.store.bytes_held == reserved)
        server.lets.set()
        held = await opening
        assert at.store.bytes_held == SIZE
        held.discard()


async def test_what_announces_no_length_takes_room_as_it_comes() -> None:
    """Else a few small ones would be all that a store has room for, by what they might be."""
    server = Server(IMAGE + bytes(3 * STEP // 2))
    at_most = {"file_bytes_max": 64 * STEP}
    async with gateway(server, 4 * STEP, **at_most) as at, asyncio.TaskGroup() as group:
        both = group.create_task(at.open("/unknown1", "/unknown2"))
        await until(lambda: at.store.bytes_held == 2 * STEP)
        server.lets.set()
        held = await both
        assert at.store.bytes_held == 2 * len(server.body)
        held.discard()
        with pytest.raises(InvalidRequest, match="the limit is 1048576 bytes"):
            async with gateway(server, 4 * STEP, file_bytes_max=STEP) as strict:
                await strict.open("/unknown")


async def test_a_request_with_videos_leaves_room_for_the_others() -> None:
    store = BlobStore("a:1", 100, ManualClock())
    videos, images = RequestRoom(store, videos=True), RequestRoom(store)
    with videos.medium(80) as video, images.medium(80) as image:
        with pytest.raises(InvalidRequest, match="may have 76 bytes; the limit is 75 bytes"):
            await video.take(76)
        await video.take(75)
        await image.take(25)
        assert store.bytes_held == 100


async def test_images_are_not_fetched_behind_videos() -> None:
    server = Server()
    async with gateway(server, 10**6, fetches_max=1) as at, asyncio.TaskGroup() as group:
        video = group.create_task(refused_by(at.open("/video")))
        await until(lambda: server.asked == ["/video"])
        image = group.create_task(at.open("/image"))
        await until(lambda: len(server.asked) == 2)
        server.lets.set()
        (await image).discard()
        assert "not a video" in await video


async def test_images_of_a_tenant_are_not_fetched_behind_all_of_another() -> None:
    server = Server()
    async with gateway(server, 10**6, fetches_max=1) as at, asyncio.TaskGroup() as group:
        many = [group.create_task(at.open(f"/a{number}")) for number in range(3)]
        await until(lambda: server.asked == ["/a0"])
        other = group.create_task(at.open("/b", tenant="globex"))
        await until(lambda: server.asked == ["/a0", "/b"])
        server.lets.set()
        for opening in (*many, other):
            (await opening).discard()


async def test_what_does_not_fit_waits_and_what_fits_passes_by() -> None:
    server = Server()
    async with gateway(server, 4 * SIZE - 1) as at, asyncio.TaskGroup() as group:
        first = group.create_task(at.open("/unknown1"))
        await until(lambda: at.store.bytes_held == LARGEST)
        second = group.create_task(at.open("/unknown2"))
        await until(lambda: len(server.asked) == 2)
        third = group.create_task(at.open("/small"))
        await until(lambda: at.store.bytes_held == LARGEST + SIZE)
        assert not second.done()
        server.lets.set()
        for opening in (first, third, second):
            (await opening).discard()


async def test_what_finds_no_room_in_time_is_refused_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room, "WAIT_S", 0.02)
    server = Server()
    # The time that it waits is not one of its fetch, and no 400.
    async with gateway(server, SIZE, fetch_timeout_s=5) as at, asyncio.TaskGroup() as group:
        first = group.create_task(at.open("/a"))
        await until(lambda: at.store.bytes_held == SIZE)
        with pytest.raises(Overloaded, match=f"no room for {SIZE} bytes") as refused:
            await at.open("/b")
        assert refused.value.retry_after_s
        assert at.store.bytes_held == SIZE
        server.lets.set()
        (await first).discard()
        (await at.open("/b")).discard()


async def test_what_can_never_fit_into_a_request_is_refused_at_once() -> None:
    server = Server()
    async with gateway(server, 3 * SIZE) as at, asyncio.TaskGroup() as group:
        total = 2 * SIZE + LARGEST
        text = f"may have {total} bytes; the limit is {3 * SIZE} bytes"
        with pytest.raises(InvalidRequest, match=text) as refused:
            await at.open("/a", "/b", "/unknown")
        assert refused.value.param in ("/a", "/b", "/unknown")
        server.lets.set()
        opening = group.create_task(at.open("/a", "/b", "/c"))
        (await opening).discard()


@pytest.mark.parametrize("path", ["/broken", "/late"])
async def test_a_fetch_that_fails_gives_its_room_back(path: str) -> None:
    server = Server()
    async with gateway(server, LARGEST, fetch_timeout_s=0.3) as at, asyncio.TaskGroup() as group:
        opening = group.create_task(refused_by(at.open(path)))
        await until(lambda: at.store.bytes_held == SIZE)
        if path == "/broken":
            server.lets.set()
        assert ("could not be" if path == "/broken" else "was not") in await opening
        assert at.store.bytes_held == 0


async def test_what_prompts_of_a_body_share_is_fetched_and_held_once() -> None:
    server = Server()
    async with gateway(server, 2 * SIZE) as at, asyncio.TaskGroup() as group:
        shared = at.shared("/a", "/a", "/b", "/a")
        opening = [group.create_task(at.open(path, shared=shared)) for path in ("/a", "/a", "/b")]
        await until(lambda: sorted(server.asked) == ["/a", "/b"])
        server.lets.set()
        first, second, alone = [await each for each in opening]
        assert at.store.bytes_held == 2 * SIZE
        for held in (first, first, alone):  # who discards twice takes nothing from others
            held.discard()
        assert at.store.bytes_held == SIZE
        second.discard()
        (await at.open("/a", shared=shared)).discard()
        assert sorted(server.asked) == ["/a", "/b"]
        # What no prompt holds at the moment gives way to others.
        both = await at.open("/c", "/d")
        both.discard()
        last = await at.open("/a", shared=shared)
        assert sorted(server.asked) == ["/a", "/a", "/b", "/c", "/d"]
        shared.close()
        assert at.store.bytes_held == SIZE
        last.discard()


async def test_a_shared_medium_is_held_as_long_as_its_last_prompt() -> None:
    server = Server()
    server.lets.set()
    async with gateway(server, 2 * SIZE) as at:
        shared = at.shared("/a", "/a")
        first = await at.open("/a", shared=shared)
        at.clock.advance(9.0)
        second = await at.open("/a", shared=shared)
        first.discard()
        at.clock.advance(9.0 + LINGER_S - 0.1)
        at.store.sweep()
        assert at.store.bytes_held == SIZE
        second.discard()
        shared.close()
        assert server.asked == ["/a"]


async def test_a_shared_medium_that_fails_fails_each_prompt_under_its_own_name() -> None:
    server = Server(b"no image")
    server.lets.set()
    async with gateway(server, 2 * SIZE) as at:
        shared = at.shared("/a", "/a")
        for _ in range(2):
            assert "not an image" in await refused_by(at.open("/a", shared=shared))
        shared.close()


async def refused_by(opening: Any) -> str:
    with pytest.raises(InvalidRequest) as refused:
        await opening
    return refused.value.message
