"""A worker's calls to encoders: which one is asked, and what happens when it does not answer."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from typing import TYPE_CHECKING, ClassVar

import msgspec
import numpy as np
import pytest
from tests.support.memory_bus import MemoryBroker, MemoryTransport
from tests.support.services import Running, running
from tests.support.wait import until
from tests.support.worker import DETOKENIZER, admit, attempt

from antiphon.model_worker.batching.media import MediaLoad, MediaLoaded
from antiphon.model_worker.batching.state import ChoiceKey, MediumRows
from antiphon.model_worker.protocol import media
from antiphon.model_worker.protocol.held_request import HeldRequest
from antiphon.model_worker.protocol.media import CALLS_MAX, ByteBudget, EmbeddingClient
from antiphon.service.clock import deadline_in
from antiphon.service.endpoint import Endpoint, RequestEndpoint
from antiphon.service.service import Report
from antiphon.service.startup import bind
from antiphon.transfer.blobs import PART_BYTES, BlobServer, BlobStore, part_digests
from antiphon.wire.base import Role
from antiphon.wire.claim import MEDIUM_GONE, MEDIUM_LOST, MEDIUM_UNREACHABLE, Claim, ImageEmbedding
from antiphon.wire.command import Rebind
from antiphon.wire.errors import Internal, Unavailable
from antiphon.wire.ids import ModelName, RequestId, TenantId
from antiphon.wire.media import Medium, MediumSpan
from antiphon.wire.routes import ENCODE_IMAGE

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from antiphon.model_worker.batching.plan import Floats
    from antiphon.service.service import Runtime
    from antiphon.wire.claim import EncodeImage

MODEL = ModelName("seeing")
TOKENS, WIDTH = 4, 3


class FakeEncoder:
    """Answers with rows that name the content of the image; while `answering` is not set, later."""

    role: ClassVar = Role.ENCODER

    def __init__(self, runtime: Runtime, shelf: BlobStore) -> None:
        self._runtime = runtime
        self._shelf = shelf
        self.asked: list[bytes] = []
        self.lost = ""
        self.reached = ""  # the one owner that is not lost
        self.tower = self.made_by = ""
        self.tenants: list[str] = []
        self.answering = asyncio.Event()
        self.answering.set()

    @staticmethod
    @asynccontextmanager
    async def lifespan(runtime: Runtime) -> AsyncGenerator[FakeEncoder]:
        with bind("127.0.0.1", 0) as bound:
            shelf = BlobStore(f"127.0.0.1:{bound.getsockname()[1]}", 10**6, runtime.clock)
            runtime.group.create_task(BlobServer(bound, shelf).run())
            yield FakeEncoder(runtime, shelf)

    def endpoints(self) -> Sequence[Endpoint]:
        here = {"encoder": self._runtime.process.instance}
        return (RequestEndpoint(route=ENCODE_IMAGE, handler=self._encode, address=here),)

    def model(self) -> ModelName:
        return MODEL

    def report(self) -> Report:
        return Report(load=0, tower=self.tower)

    async def drain(self) -> None:
        pass

    def turn_into(self, tower: str) -> None:
        self.tower = self.made_by = tower

    async def _encode(self, request: EncodeImage, _: object) -> ImageEmbedding:
        assert request.claim is not None
        digest = request.claim.digest
        self.asked.append(digest)
        self.tenants.append(request.tenant)
        await self.answering.wait()
        if self.lost and request.claim.address != self.reached:
            raise Unavailable("not fetched", details={MEDIUM_LOST: self.lost})
        rows = np.full((TOKENS, WIDTH), digest[0], "<f4") + np.arange(TOKENS)[:, None] * 1000
        rows = rows.astype("<f4")
        return ImageEmbedding(
            request_id=request.request_id,
            content_digest=digest,
            tokens=TOKENS,
            hidden=WIDTH,
            dtype="float32",
            claim=self._shelf.put(
                rows.tobytes(),
                60,
                part_bytes=8 * WIDTH,
                part_digests=part_digests(rows.tobytes(), 8 * WIDTH),
            ),
            cached=False,
            tower=self.made_by,
        )


class SeeingWorker:
    """As much of a worker as loads embeddings."""

    role: ClassVar = Role.WORKER

    def __init__(
        self,
        runtime: Runtime,
        client: EmbeddingClient,
        landed: asyncio.Queue[MediaLoaded],
        towers: list[str],
        requests: dict[RequestId, HeldRequest],
    ) -> None:
        self.runtime = runtime
        self._client = client
        self._landed = landed
        self.towers = towers
        self._requests = requests
        self._numbers = count(1)
        self._number = 0

    @staticmethod
    @asynccontextmanager
    async def lifespan(runtime: Runtime) -> AsyncGenerator[SeeingWorker]:
        landed, towers = asyncio.Queue[MediaLoaded](), list[str]()
        requests = dict[RequestId, HeldRequest]()
        client = EmbeddingClient(
            runtime,
            MODEL,
            width=WIDTH,
            bytes_max=10**8,
            held=requests.get,
            land=landed.put_nowait,
            use_tower=towers.append,
        )
        yield SeeingWorker(runtime, client, landed, towers, requests)

    def endpoints(self) -> tuple[()]:
        return ()

    def model(self) -> ModelName:
        return MODEL

    def report(self) -> Report:
        return Report(load=0)

    async def drain(self) -> None:
        pass

    @property
    def bytes_held(self) -> int:
        return self._client.bytes_held

    def begin(
        self,
        content: int,
        first: int = 0,
        last: int = TOKENS,
        made: Claim | None = None,
        *,
        tenant: str = "acme",
        tower: str | None = None,
        resume_ms: int = 0,
    ) -> None:
        """Load rows of an image, or of `made`, what a client has embedded.

        They are those of the last tower, if `tower` is None.
        """
        number = self._number = next(self._numbers)
        claim = Claim(
            address="owner:1",
            token="00",
            size_bytes=1,
            digest=bytes([content]) * 32,
            expires_unix_ms=0,
        )
        span = MediumSpan(start=0, tokens=TOKENS, key=bytes(32))
        embedded = made is not None
        medium = Medium(span=span, width=1, height=1, claim=made or claim, embedded=embedded)
        request_id = RequestId(f"{number:032x}")
        whole = admit(request_id, media=(medium,), resume_ms=resume_ms)
        self._requests[request_id] = HeldRequest(whole, [ChoiceKey(number)], 0, 0)
        load = MediaLoad(
            ChoiceKey(number),
            number,
            request_id,
            TenantId(tenant),
            {0: MediumRows(medium, first, last)},
            deadline_in(30, self.runtime.clock),
            ["", *self.towers][-1] if tower is None else tower,
        )
        self._client.load(load)

    def adopted(self, address: str) -> None:
        """Another gateway has the medium of the load that was begun last, there."""
        held = self._requests[RequestId(f"{self._number:032x}")]
        [medium] = held.media
        claim = msgspec.structs.replace(medium.claim, address=address)
        rebind = Rebind(
            request_id=held.request_id,
            attempt=attempt(2),
            continues=attempt(1),
            detokenizer=DETOKENIZER.instance,
            detokenizer_incarnation=DETOKENIZER.incarnation,
            media=(msgspec.structs.replace(medium, claim=claim),),
        )
        held.rebind(rebind, 0)

    def end(self) -> None:
        """Release the load that was begun last."""
        self._client.release(ChoiceKey(self._number), self._number)

    async def loaded(self) -> int:
        """The content that the next embedding that has come names."""
        rows = await self.rows()
        assert rows.shape == (TOKENS, WIDTH)
        return int(rows[0, 0])

    async def landed(self) -> MediaLoaded:
        return await self._landed.get()

    async def rows(self) -> Floats:
        done = await self.landed()
        assert done.error is None, done.error
        [rows] = done.embeddings.values()
        return rows


class World:
    def __init__(
        self,
        broker: MemoryBroker,
        worker: Running[SeeingWorker],
        encoders: list[tuple[MemoryTransport, Running[FakeEncoder]]],
    ) -> None:
        self.broker = broker
        self.worker = worker
        self.encoders = encoders

    async def load(self, content: int) -> None:
        self.worker.service.begin(content)
        assert await self.worker.service.loaded() == content

    @property
    def asked(self) -> list[list[int]]:
        return [[digest[0] for digest in each.service.asked] for _, each in self.encoders]


@asynccontextmanager
async def world() -> AsyncGenerator[World]:
    broker = MemoryBroker()
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(running(SeeingWorker, MemoryTransport(broker)))
        encoders: list[tuple[MemoryTransport, Running[FakeEncoder]]] = []
        for number in range(2):
            link = MemoryTransport(broker)
            started = running(FakeEncoder, link, instance=f"encoder-{number}")
            encoders.append((link, await stack.enter_async_context(started)))
        made = World(broker, worker, encoders)
        peers = worker.service.runtime.peers
        await until(lambda: len(peers.accepting_work(Role.ENCODER)) == len(encoders))
        yield made


async def test_a_picture_is_asked_for_at_the_same_encoder_and_pictures_are_spread() -> None:
    async with world() as made:
        for _ in range(2):
            for content in range(1, 33):
                await made.load(content)
        one, two = made.asked
        assert min(len(one), len(two)) > 8
        assert not set(one) & set(two)
        assert sorted(one + two) == sorted([*range(1, 33)] * 2)


async def test_rows_are_fetched_as_they_are_needed_and_counted() -> None:
    async with world() as made:
        worker = made.worker.service
        for first in range(TOKENS):
            for last in range(first + 1, TOKENS + 1):
                worker.begin(7, first, last)
                rows = await worker.rows()
                assert rows.shape == (last - first, WIDTH)
                assert rows[:, 0].tolist() == [7 + 1000 * row for row in range(first, last)]
                parts = 0 if last - first == TOKENS else 2 * PART_BYTES
                assert worker.bytes_held == 4 * WIDTH * (last - first) + parts
                worker.end()
                await until(lambda: not worker.bytes_held)


async def test_what_a_client_has_embedded_is_fetched_from_its_owner() -> None:
    rows = np.arange(TOKENS * WIDTH, dtype="<f4")
    async with world() as made:
        worker = made.worker.service
        with bind("127.0.0.1", 0) as bound:
            owner = BlobStore(f"127.0.0.1:{bound.getsockname()[1]}", 10**6, worker.runtime.clock)
            server = worker.runtime.group.create_task(BlobServer(bound, owner).run())
            for data, first, last in ((rows, 0, TOKENS), (rows, 1, 3), (rows[:-1], 0, TOKENS)):
                worker.begin(0, first, last, owner.put(data.tobytes(), 60))
                done = await worker.landed()
                if len(data) < len(rows):
                    assert isinstance(done.error, Internal)
                else:
                    assert (done.embeddings[0] == rows.reshape(TOKENS, WIDTH)[first:last]).all()
            claim = owner.put(rows.tobytes(), 60)
            owner.discard(claim)
            worker.begin(0, 0, TOKENS, claim)
            gone = (await worker.landed()).error
            assert isinstance(gone, Unavailable)
            assert "is gone" in gone.message
            server.cancel()
        assert made.asked == [[], []], "no encoder is called"


@pytest.mark.parametrize("lost", [MEDIUM_GONE, MEDIUM_UNREACHABLE])
async def test_a_medium_whose_owner_is_gone_ends_its_request_before_the_deadline(
    lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(media, "GATEWAY_LOST_S", 0.2)
    async with world() as made:
        for _, encoder in made.encoders:
            encoder.service.lost = lost
        made.worker.service.begin(1)
        error = (await made.worker.service.landed()).error
        assert isinstance(error, Unavailable)
        assert (error.param, error.message.endswith("is gone; send the request again")) == (
            "media.0",
            True,
        )
        assert made.worker.service.bytes_held == 0
        # Another one may reach an owner that one of them does not.
        assert sum(map(bool, made.asked)) == (1 if lost == MEDIUM_GONE else 2)


@pytest.mark.parametrize("lost", [MEDIUM_GONE, MEDIUM_UNREACHABLE])
async def test_a_medium_is_embedded_from_the_gateway_that_adopts_its_request(
    lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then it takes no memory, which others need."""
    monkeypatch.setattr(media, "GATEWAY_LOST_S", 0.2)
    async with world() as made:
        worker = made.worker.service
        for _, encoder in made.encoders:
            encoder.service.lost, encoder.service.reached = lost, "gateway-1:1"
        worker.begin(1, resume_ms=20_000)
        await until(lambda: any(made.asked) and not worker.bytes_held)
        worker.adopted("gateway-1:1")
        assert await worker.loaded() == 1
        worker.begin(2, resume_ms=20_000)
        worker.adopted("gateway-1:1")
        assert await worker.loaded() == 2
        worker.end()


async def test_a_medium_that_no_gateway_adopts_ends_its_request_after_the_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(media, "GATEWAY_LOST_S", 0.1)
    async with world() as made:
        worker, clock = made.worker.service, made.worker.service.runtime.clock
        for _, encoder in made.encoders:
            encoder.service.lost = MEDIUM_GONE
        began = clock.now()
        worker.begin(1, resume_ms=300)
        error = (await worker.landed()).error
        assert isinstance(error, Unavailable)
        assert error.message.endswith("is gone; send the request again")
        assert clock.now() - began >= 0.4
        assert sum(map(len, made.asked)) == 1, "its owner will not have it again"


async def test_a_medium_whose_owner_is_reached_again_is_embedded() -> None:
    async with world() as made:
        for _, encoder in made.encoders:
            encoder.service.lost = MEDIUM_UNREACHABLE
        made.worker.service.begin(1)
        await until(lambda: any(made.asked))
        for _, encoder in made.encoders:
            encoder.service.lost = ""
        assert await made.worker.service.loaded() == 1


async def test_a_picture_of_a_tenant_does_not_wait_for_all_of_another() -> None:
    many = 4 * CALLS_MAX
    async with world() as made:
        worker = made.worker.service
        for _, encoder in made.encoders:
            encoder.service.answering.clear()
        for content in range(1, many + 1):
            worker.begin(content)
        await until(lambda: min(map(len, made.asked)) == CALLS_MAX)
        worker.begin(200, tenant="globex")
        await until(lambda: any(200 in asked for asked in made.asked))
        assert {*made.encoders[0][1].service.tenants} | {*made.encoders[1][1].service.tenants} == {
            "acme",
            "globex",
        }
        assert sum(map(len, made.asked)) == 2 * CALLS_MAX + 1
        for _, encoder in made.encoders:
            encoder.service.answering.set()
        assert {await worker.loaded() for _ in range(many + 1)} == {*range(1, many + 1), 200}


async def test_encoders_of_one_tower_are_asked_at_a_time() -> None:
    async with world() as made:
        worker = made.worker.service
        one, two = (encoder.service for _, encoder in made.encoders)
        for encoder in (one, two):
            encoder.turn_into("a")
        await until(lambda: worker.towers == ["a"])
        # As in a rolling upgrade: the tower is that of most encoders, and before that the old one.
        one.turn_into("b")
        await announced(worker, ["b", "a"])
        for content in range(1, 17):
            await made.load(content)
        assert [len(asked) for asked in made.asked] == [0, 16]
        two.turn_into("b")
        await until(lambda: worker.towers == ["a", "b"])
        for content in range(17, 49):
            await made.load(content)
        assert min(len(made.asked[0]), len(made.asked[1]) - 16) > 8
        # One that returns to the tower before is in the minority.
        two.turn_into("a")
        await announced(worker, ["b", "a"])
        assert worker.towers == ["a", "b"]


async def test_a_load_of_a_tower_that_is_gone_waits_until_it_is_given_up() -> None:
    async with world() as made:
        worker = made.worker.service
        worker.begin(1, tower="gone")
        for _, encoder in made.encoders:
            encoder.service.turn_into("a")
        await until(lambda: worker.towers == ["a"])
        worker.end()
        assert (await worker.landed()).error is not None, "which the batching loop ignores"
        worker.begin(2)
        assert await worker.loaded() == 2
        assert sorted(map(len, made.asked)) == [0, 1]


async def test_an_embedding_of_another_tower_is_not_used() -> None:
    """An encoder may have been started anew under its name, of which no heartbeat has come yet."""
    async with world() as made:
        worker = made.worker.service
        for _, encoder in made.encoders:
            encoder.service.turn_into("a")
            encoder.service.made_by = "b"
        await until(lambda: worker.towers == ["a"])
        worker.begin(1)
        await until(lambda: sum(map(len, made.asked)) > 1)
        for _, encoder in made.encoders:
            encoder.service.made_by = "a"
        assert await worker.loaded() == 1


async def announced(worker: SeeingWorker, towers: list[str]) -> None:
    """Wait until the worker knows that the encoders have these towers."""
    peers = worker.runtime.peers
    await until(lambda: [peer.heartbeat.tower for peer in peers.with_role(Role.ENCODER)] == towers)


async def test_what_waits_for_an_encoder_that_is_silent_is_asked_of_another() -> None:
    many = 4 * CALLS_MAX
    async with world() as made:
        worker = made.worker.service
        made.encoders[0][1].service.answering.clear()
        for content in range(1, many + 1):
            worker.begin(content)
        await until(lambda: len(made.asked[0]) == CALLS_MAX)
        made.broker.cut(made.encoders[0][0])
        assert {await worker.loaded() for _ in range(many)} == {*range(1, many + 1)}
        assert len(made.asked[0]) == CALLS_MAX
        made.broker.heal(made.encoders[0][0])
        made.encoders[0][1].service.answering.set()


async def test_tenants_take_turns_for_memory() -> None:
    budget, order = ByteBudget(10), list[str]()

    async def take(key: str, size_bytes: int) -> None:
        await budget.take(key, size_bytes, TenantId(key[0]))
        order.append(key)

    async def free(count: int) -> None:
        """Free what has come last, once so many have come."""
        await until(lambda: len(order) == count)
        budget.free(order[-1])

    sizes = {"a0": 9, "a1": 9, "a2": 9, "a3": 9, "b1": 2, "b2": 9}
    async with asyncio.TaskGroup() as group:
        for key, size_bytes in sizes.items():
            group.create_task(take(key, size_bytes))
        for count in range(1, len(sizes) + 1):
            await free(count)
    assert order == ["a0", "a1", "b1", "a2", "b2", "a3"]
    assert budget.held == 0


async def test_calls_of_an_encoder_that_is_silent_are_made_at_another() -> None:
    async with world() as made:
        for _, encoder in made.encoders:
            encoder.service.answering.clear()
        made.worker.service.begin(1)
        await until(lambda: any(made.asked))
        [first] = [number for number, asked in enumerate(made.asked) if asked]
        made.encoders[1 - first][1].service.answering.set()
        made.broker.cut(made.encoders[first][0])
        assert await made.worker.service.loaded() == 1
        assert made.asked[1 - first] == [1]
        made.broker.heal(made.encoders[first][0])
        made.encoders[first][1].service.answering.set()
