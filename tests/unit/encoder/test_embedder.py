"""Each image is embedded once at a time, and kept as long as there is room."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from tests.support.wait import until

from antiphon.encoder import cache as embeddings
from antiphon.encoder.cache import CachedEmbedding, Embedder, EmbeddingCache
from antiphon.wire.claim import MEDIUM_GONE, MEDIUM_LOST
from antiphon.wire.errors import InvalidRequest, Unavailable
from antiphon.wire.ids import TenantId

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Iterator

BYTES = 10
BROKEN, UNREADABLE, VIDEO = b"broken", b"unreadable", b"video"
ACME, GLOBEX = TenantId("acme"), TenantId("globex")


def embedding(size: int = BYTES) -> CachedEmbedding:
    return CachedEmbedding(bytes(size), tokens=1, hidden=1, checksum=b"")


def digest(image: bytes) -> bytes:
    return hashlib.sha256(image).digest()


class SlowModel:
    def __init__(self) -> None:
        self.let = threading.Event()
        self.begun: Counter[bytes] = Counter()
        self.order: list[bytes] = []

    def steps(self, medium: bytes) -> Iterator[CachedEmbedding | None]:
        """One, or three of a video."""
        for left in (2, 1, 0) if medium == VIDEO else (0,):
            self.order.append(medium)
            self.begun[medium] += 1
            assert self.let.wait(5), "never let"
            if medium == BROKEN:
                raise InvalidRequest("broken")
            yield None if left else embedding()


class World:
    def __init__(self, thread: ThreadPoolExecutor, group: asyncio.TaskGroup) -> None:
        self.model = SlowModel()
        self.cache = EmbeddingCache(1000)
        self.embedder = Embedder(self.model.steps, self.cache, thread, group)
        self.prepared: Counter[bytes] = Counter()
        self.held: Counter[bytes] = Counter()
        self.source = asyncio.Event()
        self.source.set()

    async def embed(
        self, image: bytes, tenant: TenantId = ACME, *, lost: bool = False
    ) -> CachedEmbedding:
        @asynccontextmanager
        async def prepare() -> AsyncGenerator[bytes]:
            self.prepared[image] += 1
            await self.source.wait()
            if image == UNREADABLE:
                raise InvalidRequest("unreadable")
            if lost:
                raise Unavailable("gone", details={MEDIUM_LOST: MEDIUM_GONE})
            self.held[image] += 1
            try:
                yield image
            finally:
                self.held[image] -= 1

        return await self.embedder.embed(digest(image), prepare, tenant)


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[World]:
    monkeypatch.setattr(embeddings, "LINGER_S", 0.0)
    with ThreadPoolExecutor(1) as thread:
        async with asyncio.TaskGroup() as group:
            made = World(thread, group)
            try:
                yield made
            finally:
                made.model.let.set()
    assert not +made.held


@asynccontextmanager
async def quiet() -> AsyncGenerator[None]:
    """Fail if the loop reports an exception that was never retrieved."""
    reported: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    yield
    await asyncio.sleep(0)
    assert reported == []


async def test_concurrent_calls_share_one_run(world: World) -> None:
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(world.embed(b"a")) for _ in range(8)]
        await until(lambda: world.model.begun[b"a"] > 0)
        world.model.let.set()
    first = asked[0].result()
    assert all(task.result() is first for task in asked)
    assert await world.embed(b"a") is first
    assert world.prepared == world.model.begun == {b"a": 1}


async def test_call_whose_owner_has_the_medium_does_not_fail_with_one_whose_owner_is_gone(
    world: World,
) -> None:
    world.source.clear()
    world.model.let.set()
    async with asyncio.TaskGroup() as group:
        outcomes = [
            group.create_task(_outcome(world.embed(b"a", lost=lost)))
            for lost in (True, True, False, False)
        ]
        await until(lambda: world.prepared[b"a"] == 1)
        world.source.set()
    gone = [isinstance(outcome.result(), Unavailable) for outcome in outcomes]
    assert gone == [True, True, False, False]
    assert world.model.begun == {b"a": 1}


async def _outcome(call: Awaitable[CachedEmbedding]) -> CachedEmbedding | Unavailable:
    try:
        return await call
    except Unavailable as error:
        return error


async def test_cancelled_call_does_not_affect_other_calls(world: World) -> None:
    async with asyncio.TaskGroup() as group:
        leaves, stays = (group.create_task(world.embed(b"a")) for _ in range(2))
        await until(lambda: world.model.begun[b"a"] > 0)
        leaves.cancel()
        await until(leaves.done)
        world.model.let.set()
    assert leaves.cancelled()
    assert stays.result().data == bytes(BYTES)


async def test_queued_image_without_waiting_calls_is_not_started(world: World) -> None:
    async with asyncio.TaskGroup() as group:
        ahead = group.create_task(world.embed(b"a"))
        left = group.create_task(world.embed(b"b"))
        await until(lambda: world.model.begun[b"a"] > 0)
        left.cancel()
        await until(left.done)
        again = group.create_task(world.embed(b"b"))  # joins nothing that was given up
        await asyncio.sleep(0)
        again.cancel()
        await until(again.done)
        world.model.let.set()
    assert ahead.result().data == bytes(BYTES)
    assert world.model.begun == {b"a": 1}
    assert (await world.embed(b"b")).data == bytes(BYTES)


async def test_what_was_begun_ends_in_the_cache(world: World) -> None:
    async with asyncio.TaskGroup() as group:
        left = group.create_task(world.embed(b"a"))
        await until(lambda: world.model.begun[b"a"] > 0)
        left.cancel()
    world.model.let.set()
    await until(lambda: world.cache.get(digest(b"a")) is not None)
    await world.embed(b"a")
    assert world.model.begun == {b"a": 1}


async def test_error_reaches_all_waiting_calls_and_is_not_cached(world: World) -> None:
    async with quiet(), asyncio.TaskGroup() as group:
        asked = [group.create_task(settle(world.embed(BROKEN))) for _ in range(3)]
        await until(lambda: world.model.begun[BROKEN] > 0)
        world.model.let.set()
    assert [task.result() for task in asked] == ["broken"] * 3
    assert len(world.cache) == 0
    assert await settle(world.embed(BROKEN)) == "broken"
    assert world.model.begun == {BROKEN: 2}


async def test_image_that_no_call_waits_for_is_not_prepared_further(world: World) -> None:
    world.source.clear()
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(world.embed(b"a")) for _ in range(2)]
        await until(lambda: world.prepared[b"a"] > 0)
        for each in asked:
            each.cancel()
    world.source.set()
    world.model.let.set()
    assert (await world.embed(b"a")).data == bytes(BYTES)
    assert world.prepared == {b"a": 2}
    assert world.model.begun == {b"a": 1}


@pytest.mark.parametrize("medium", [b"a", VIDEO])
async def test_a_call_that_is_made_again_finds_the_medium_on_its_way(
    world: World, monkeypatch: pytest.MonkeyPatch, medium: bytes
) -> None:
    """Else what takes longer than a call would be begun with each call, and never end."""
    monkeypatch.setattr(embeddings, "LINGER_S", 60.0)
    world.source.clear()
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await world.embed(medium)
    world.source.set()
    await until(lambda: world.model.begun[medium] > 0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await world.embed(medium)
    world.model.let.set()
    assert (await world.embed(medium)).data == bytes(BYTES)
    assert world.prepared == {medium: 1}
    assert world.model.begun == {medium: 3 if medium == VIDEO else 1}


async def test_image_that_cannot_be_prepared_is_an_error_of_all_calls(world: World) -> None:
    async with quiet(), asyncio.TaskGroup() as group:
        asked = [group.create_task(settle(world.embed(UNREADABLE))) for _ in range(3)]
    assert [task.result() for task in asked] == ["unreadable"] * 3
    assert world.prepared == {UNREADABLE: 1}
    assert not world.model.begun


async def test_error_without_waiting_calls_is_not_reported(world: World) -> None:
    async with quiet():
        async with asyncio.TaskGroup() as group:
            left = group.create_task(world.embed(BROKEN))
            await until(lambda: world.model.begun[BROKEN] > 0)
            left.cancel()
        world.model.let.set()
        assert (await world.embed(b"behind it")).data == bytes(BYTES)


async def test_an_image_does_not_wait_for_all_of_a_video(world: World) -> None:
    async with asyncio.TaskGroup() as group:
        video = group.create_task(world.embed(VIDEO))
        await until(lambda: world.model.begun[VIDEO] > 0)
        group.create_task(world.embed(b"a"))
        await until(lambda: world.prepared[b"a"] > 0)
        world.model.let.set()
    assert world.model.order == [VIDEO, b"a", VIDEO, VIDEO]
    assert await world.embed(VIDEO) is video.result()


async def test_an_image_of_a_tenant_waits_for_one_step_of_another(world: World) -> None:
    async with asyncio.TaskGroup() as group:
        many = [bytes([number]) for number in range(200)]
        for image in (VIDEO, *many):
            group.create_task(world.embed(image))
        await until(lambda: world.prepared.total() == 1 + len(many))
        await until(lambda: world.model.begun[VIDEO] > 0)
        group.create_task(world.embed(b"small", GLOBEX))
        group.create_task(world.embed(b"next", GLOBEX))
        await until(lambda: world.prepared[b"next"] > 0)
        world.model.let.set()
    assert world.model.order[:5] == [VIDEO, b"small", many[0], b"next", many[1]]
    assert len(world.model.order) == 3 + len(many) + 2
    assert not world.embedder._turns._running


async def test_what_is_prepared_is_held_until_it_is_embedded(world: World) -> None:
    """An encoder has few videos in memory: each has a slot until its frames are not needed."""
    async with asyncio.TaskGroup() as group:
        video = group.create_task(world.embed(VIDEO))
        await until(lambda: world.model.begun[VIDEO] > 0)
        assert world.held[VIDEO] == 1
        world.model.let.set()
        await video
        await until(lambda: not world.held[VIDEO])


async def test_a_video_that_no_call_waits_for_is_not_finished(world: World) -> None:
    async with asyncio.TaskGroup() as group:
        left = group.create_task(world.embed(VIDEO))
        await until(lambda: world.model.begun[VIDEO] > 0)
        left.cancel()
    world.model.let.set()
    assert (await world.embed(b"a")).data == bytes(BYTES)
    assert world.model.order == [VIDEO, b"a"]
    assert (await world.embed(VIDEO)).data == bytes(BYTES)


async def settle(asked: object) -> str:
    try:
        await asked  # type: ignore[misc]
    except InvalidRequest as error:
        return error.message
    return "embedded"


def test_the_cache_keeps_what_was_used_last() -> None:
    cache = EmbeddingCache(3 * BYTES)
    for name in (b"a", b"b", b"c"):
        cache.put(name, embedding())
    assert cache.get(b"a") is not None
    cache.put(b"d", embedding())
    assert [name for name in (b"a", b"b", b"c", b"d") if cache.get(name)] == [b"a", b"c", b"d"]
    assert cache.bytes_held == 3 * BYTES


def test_the_cache_gives_nothing_away_for_what_does_not_fit() -> None:
    cache = EmbeddingCache(3 * BYTES)
    cache.put(b"a", embedding())
    cache.put(b"b", embedding(3 * BYTES + 1))
    assert cache.get(b"a") is not None
    assert cache.get(b"b") is None
    cache.put(b"a", embedding())
    assert (len(cache), cache.bytes_held) == (1, BYTES)
