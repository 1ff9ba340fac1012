"""Images in, claims on embeddings out, over the bus and real sockets."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from tests.support.memory_bus import MemoryBroker, MemoryTransport
from tests.support.services import QUICK, Running, client_bus, running
from tests.support.wait import until
from tests.unit.encoder.images import BLUE, RED

from antiphon.config.settings import EncoderConfig, Settings
from antiphon.encoder import cache as embeddings
from antiphon.encoder import model as vision
from antiphon.encoder.cache import DecodeJob
from antiphon.encoder.decode_process import DecodeProcesses, DecodeSettings
from antiphon.encoder.model import VisionModel, open_model
from antiphon.encoder.service import EncoderService, ImageEncoder, cache_bytes_max
from antiphon.resolve.device import HostDevice
from antiphon.service.clock import SystemClock, deadline_in
from antiphon.service.process_pool import ProcessPool
from antiphon.service.startup import CannotStart, bind
from antiphon.transfer.blobs import BlobServer, BlobStore, fetch, new_token
from antiphon.wire.claim import (
    MEDIUM_GONE,
    MEDIUM_LOST,
    MEDIUM_UNREACHABLE,
    AudioWindow,
    Claim,
    EncodeImage,
    ImageEmbedding,
    VideoHeader,
)
from antiphon.wire.errors import (
    DeadlineExceeded,
    EngineError,
    InvalidRequest,
    Overloaded,
    RequestTooLarge,
    Unavailable,
    Unsupported,
)
from antiphon.wire.ids import InstanceId, ModelName, TenantId, new_request_id
from antiphon.wire.routes import ENCODE_IMAGE

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from antiphon.bus.bus import Bus
    from antiphon.encoder.audio import DecodedAudio
    from antiphon.encoder.cache import CachedEmbedding
    from antiphon.encoder.preprocess import DecodedImage
    from antiphon.service.service import Service

CLOCK = SystemClock()
MODEL = ModelName("antiphon-small")
ENCODER = InstanceId("encoder-0")
ACME, GLOBEX = TenantId("acme"), TenantId("globex")


class World:
    def __init__(self, bus: Bus, encoder: Running[Service]) -> None:
        self.bus = bus
        self.encoder = encoder

    async def ask(
        self,
        image: bytes | None = None,
        claim: Claim | None = None,
        within_s: float = 5.0,
        tenant: TenantId = ACME,
    ) -> ImageEmbedding:
        request = EncodeImage(
            request_id=new_request_id(),
            model=MODEL,
            image=image,
            claim=claim,
            deadline_unix_ms=deadline_in(within_s, CLOCK),
            tenant=tenant,
        )
        return await self.bus.call(ENCODE_IMAGE, request, timeout_s=10, encoder=ENCODER)

    async def refusal(self, image: bytes | None = None, **rest: Claim | float) -> EngineError:
        with pytest.raises(EngineError) as caught:
            await self.ask(image, **rest)  # type: ignore[arg-type]
        return caught.value

    async def video_refusal(self, video: bytes, tenant: TenantId = ACME) -> EngineError:
        request = EncodeImage(
            request_id=new_request_id(),
            model=MODEL,
            image=video,
            width=64,
            height=48,
            video=VideoHeader(frames=8, fps=2.0),
            deadline_unix_ms=deadline_in(10.0, CLOCK),
            tenant=tenant,
        )
        with pytest.raises(EngineError) as caught:
            await self.bus.call(ENCODE_IMAGE, request, timeout_s=10, encoder=ENCODER)
        return caught.value

    @property
    def shelf(self) -> BlobStore:
        service = self.encoder.service
        assert isinstance(service, EncoderService)
        assert service._images is not None
        return service._images._shelf

    def embedded(self) -> float:
        return self.counted("request_e2e_latency_seconds_count") or 0.0

    def counted(self, name: str) -> float | None:
        return self.encoder.metrics.registry.get_sample_value(f"antiphon_encoder_{name}")


def settings(folder: Path | str, **encoder: float | str) -> Settings:
    return replace(QUICK, encoder=replace(EncoderConfig(), model_path=str(folder), **encoder))


@asynccontextmanager
async def started(chosen: Settings) -> AsyncGenerator[World]:
    broker = MemoryBroker()
    async with (
        running(EncoderService, MemoryTransport(broker), settings=chosen) as encoder,
        client_bus(MemoryTransport(broker)) as bus,
    ):
        yield World(bus, encoder)


@pytest.fixture
async def world(siglip: Path) -> AsyncGenerator[World]:
    async with started(settings(siglip)) as made:
        yield made


@asynccontextmanager
async def holding(data: bytes) -> AsyncGenerator[Claim]:
    """Let an image wait to be fetched, as a gateway does."""
    with bind("127.0.0.1", 0) as bound:
        shelf = BlobStore(f"127.0.0.1:{bound.getsockname()[1]}", 10**6, CLOCK)
        async with asyncio.TaskGroup() as group:
            server = group.create_task(BlobServer(bound, shelf).run())
            yield shelf.put(data, 60)
            server.cancel()


class Brake:
    """Holds up the model's thread until released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached = threading.Event()
        self._released = threading.Event()
        embed = VisionModel.embed

        def slowly(model: VisionModel, decoded: DecodedImage) -> CachedEmbedding:
            self.reached.set()
            assert self._released.wait(5), "never released"
            return embed(model, decoded)

        monkeypatch.setattr(VisionModel, "embed", slowly)

    def release(self) -> None:
        self._released.set()


async def test_an_image_comes_back_as_embeddings_that_wait_to_be_fetched(
    siglip: Path, world: World
) -> None:
    answer = await world.ask(RED)
    data = await fetch(answer.claim, timeout_s=5, bytes_max=10**6)
    assert (answer.tokens, answer.hidden, answer.dtype, answer.cached) == (4, 16, "float32", False)
    assert answer.content_digest == hashlib.sha256(RED).digest()
    rows = np.frombuffer(data, "<f4").reshape(answer.tokens, answer.hidden)
    model = open_model(settings(siglip), siglip)
    expected = model.embed(model.preprocess.decoded(RED))
    np.testing.assert_array_equal(rows, np.frombuffer(expected.data, "<f4").reshape(4, 16))
    assert np.ptp(rows) > 0.1


async def test_the_same_image_again_is_a_hit_under_the_same_claim(world: World) -> None:
    first, other, again = await world.ask(RED), await world.ask(BLUE), await world.ask(RED)
    assert world.embedded() == 2
    expected = {
        "requests_received_total": 3,
        "requests_total": 3,
        "cache_total_files_total": 3,
        "cache_hit_files_total": 1,
        "cache_total_tokens_total": 12,
        "cache_hit_tokens_total": 4,
        "cache_entries": 2,
        "cache_evictions_total": 0,
    }
    assert {name: world.counted(name) for name in expected} == expected
    assert (first.cached, other.cached, again.cached) == (False, False, True)
    assert again.claim == first.claim
    assert other.claim.digest != first.claim.digest


async def test_a_claim_that_will_expire_soon_is_not_given_out_again(siglip: Path) -> None:
    async with started(settings(siglip, claim_s=0.2)) as world:
        first = await world.ask(RED)
        await until(lambda: CLOCK.unix_ms() > first.claim.expires_unix_ms - 100)
        again = await world.ask(RED)
        assert again.cached
        assert again.claim.expires_unix_ms > first.claim.expires_unix_ms
        await fetch(again.claim, timeout_s=5, bytes_max=10**6)


async def test_embedding_that_makes_room_for_another_is_counted(siglip: Path) -> None:
    async with started(settings(siglip, cache_bytes_max=4 * 16 * 4)) as world:
        await world.ask(RED)
        await world.ask(BLUE)
        await world.refusal(RED[:40])
        names = ("cache_evictions_total", "cache_entries", "requests_received_total")
        assert [world.counted(name) for name in names] == [1, 1, 3]
        assert world.counted("requests_total") == 2


async def test_an_image_may_come_by_claim_and_a_hit_needs_no_fetch(world: World) -> None:
    async with holding(RED) as claim:
        first = await world.ask(claim=claim)
    assert (await world.ask(claim=claim)).cached  # the image is not stored any more
    assert (await world.ask(RED)).claim == first.claim


async def test_one_image_asked_for_by_many_at_a_time_is_embedded_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    brake = Brake(monkeypatch)
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(world.ask(RED)) for _ in range(8)]
        await until(brake.reached.is_set)
        brake.release()
        answers = [await task for task in asked]
        assert world.embedded() == 1
    assert len({answer.claim.token for answer in answers}) == 1


async def test_a_deadline_ends_the_wait(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    brake = Brake(monkeypatch)
    monkeypatch.setattr(embeddings, "LINGER_S", 0.0)
    assert isinstance(await world.refusal(RED, within_s=-1), DeadlineExceeded)
    assert not brake.reached.is_set()
    while not brake.reached.is_set():  # a busy machine may not begin in time
        assert isinstance(await world.refusal(RED, within_s=0.1), DeadlineExceeded)
    assert isinstance(await world.refusal(BLUE, within_s=0.1), DeadlineExceeded)
    brake.release()
    await until(lambda: world.embedded() == 1)
    assert (await world.ask(RED)).cached  # what was begun is not thrown away
    assert not (await world.ask(BLUE)).cached  # what had not been begun was given up


async def test_tenants_and_images_of_other_sizes_are_decoded_in_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a small one waits for all large ones that came before."""
    turns, tenants = list[str](), list[str]()

    async def run(
        _: ProcessPool, *job: bytes, timeout_s: float, owner: str, kind: str
    ) -> bytearray:
        assert job
        turns.append(kind)
        tenants.append(owner)
        raise Unavailable(f"within {timeout_s} s")

    monkeypatch.setattr(ProcessPool, "run", run)
    processes = DecodeProcesses(DecodeSettings(None, 10**9), EncoderConfig())
    sizes = [(8000, 6000), (8001, 6000), (640, 480), (320, 320), (0, 0)]
    for width, height in sizes:
        with pytest.raises(Unavailable):
            await processes.decode(RED, DecodeJob(width, height), timeout_s=1, tenant=ACME)
    window = AudioWindow(format="wav", seconds=1.0)
    with pytest.raises(Unavailable):
        await processes.decode_audio(RED, window, timeout_s=1, tenant=GLOBEX)
    assert turns[0] == turns[1]
    assert len({*turns}) == len(sizes)
    assert tenants == [ACME] * len(sizes) + [GLOBEX]


async def test_calls_for_videos_leave_slots_to_those_for_images(
    siglip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let, waiting, decoded = asyncio.Event(), list[bytes | None](), ImageEncoder._decoded

    async def slowly(self: ImageEncoder, request: EncodeImage) -> DecodedImage | DecodedAudio:
        if request.video is None:
            return await decoded(self, request)
        waiting.append(request.image)
        await let.wait()
        raise InvalidRequest("no video")

    monkeypatch.setattr(ImageEncoder, "_decoded", slowly)
    monkeypatch.setattr(ImageEncoder, "_seen", lambda *_: ([0], (8, 8)))
    chosen = settings(siglip)
    chosen = replace(chosen, service=replace(chosen.service, slots=2))
    async with started(chosen) as world, asyncio.TaskGroup() as group:
        first = group.create_task(world.video_refusal(b"no video"))
        await until(lambda: waiting == [b"no video"])
        assert isinstance(await world.video_refusal(b"another"), Overloaded)
        other = group.create_task(world.video_refusal(b"of another", GLOBEX))
        await until(lambda: waiting == [b"no video", b"of another"])
        assert isinstance(await world.video_refusal(b"more", GLOBEX), Overloaded)
        assert (await world.ask(RED)).tokens
        let.set()
        assert isinstance(await first, InvalidRequest)
        assert isinstance(await other, InvalidRequest)


async def test_a_call_of_a_tenant_does_not_wait_for_all_of_another(
    siglip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let, begun, decoded = asyncio.Event(), list[TenantId](), ImageEncoder._decoded

    async def slowly(self: ImageEncoder, request: EncodeImage) -> DecodedImage | DecodedAudio:
        begun.append(request.tenant)
        await let.wait()
        return await decoded(self, request)

    monkeypatch.setattr(ImageEncoder, "_decoded", slowly)
    chosen = settings(siglip)
    chosen = replace(chosen, service=replace(chosen.service, slots=1))
    async with started(chosen) as world, asyncio.TaskGroup() as group:
        many = [RED + bytes(number) for number in range(4)]
        asked = [group.create_task(world.ask(image)) for image in many]
        await until(lambda: begun == [ACME])
        small = group.create_task(world.ask(BLUE, tenant=GLOBEX))
        await until(lambda: begun == [ACME, GLOBEX])
        let.set()
        assert (await small).tokens == 4
        assert {(await each).tokens for each in asked} == {4}


async def test_shutdown_answers_waiting_calls(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    brake = Brake(monkeypatch)
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(world.ask(RED))
        await until(brake.reached.is_set)
        world.encoder.stop.set()
        brake.release()
        assert (await asked).tokens == 4


async def test_bad_requests_are_named(siglip: Path) -> None:
    async with started(settings(siglip, image_bytes_max=len(RED), pixels_max=600)) as world:
        broken = await world.refusal(RED[:40])
        assert isinstance(broken, InvalidRequest)
        assert broken.param == "image"
        assert (await world.refusal(None)).message == "give exactly one of image and claim"
        large = await world.refusal(RED + b" ")
        assert isinstance(large, RequestTooLarge)
        assert large.details["bytes_max"] == str(len(RED))
        async with holding(RED + b" ") as claim:
            assert isinstance(await world.refusal(claim=claim), RequestTooLarge)
            both = await world.refusal(RED, claim=claim)
            assert both.message == "give exactly one of image and claim"
        assert (await world.ask(RED)).tokens == 4
    async with started(settings(siglip, pixels_max=599)) as world:
        assert "600 pixels; the limit is 599" in (await world.refusal(RED)).message


async def test_a_claim_that_cannot_be_fetched_is_unavailable(world: World) -> None:
    async with holding(RED) as claim:
        for lie in (
            replace(claim, digest=hashlib.sha256(b"another").digest()),
            replace(claim, token=new_token()),
        ):
            refused = await world.refusal(claim=lie)
            assert isinstance(refused, Unavailable)
            assert refused.details == {MEDIUM_LOST: MEDIUM_GONE}
    refused = await world.refusal(claim=claim)
    assert isinstance(refused, Unavailable)
    assert refused.details == {MEDIUM_LOST: MEDIUM_UNREACHABLE}
    assert world.embedded() == 0


async def test_too_much_that_waits_is_overload(siglip: Path) -> None:
    async with started(settings(siglip, claims_bytes_max=4 * 16 * 4)) as world:
        assert (await world.ask(RED)).claim == (await world.ask(RED)).claim
        full = await world.refusal(BLUE)
        assert isinstance(full, Overloaded)
        assert full.retry_after_s is not None


async def test_what_was_fetched_gives_way_to_other_results(siglip: Path) -> None:
    async with started(settings(siglip, claims_bytes_max=4 * 16 * 4)) as world:
        first = await world.ask(RED)
        await fetch(first.claim, timeout_s=5, bytes_max=10**6)
        await until(lambda: world.shelf._blobs[first.claim.token].spare)
        other = await world.ask(BLUE)
        assert world.shelf.bytes_held == 4 * 16 * 4
        assert isinstance(await world.refusal(RED), Overloaded), "the other one is not fetched yet"
        await fetch(other.claim, timeout_s=5, bytes_max=10**6)
        await until(lambda: world.shelf._blobs[other.claim.token].spare)
        again = await world.ask(RED)
        assert again.cached
        assert again.claim.token != first.claim.token


async def test_nothing_is_held_when_the_claims_have_expired(siglip: Path) -> None:
    async with started(settings(siglip, claim_s=0.05)) as world:
        await world.ask(RED)
        await until(lambda: not world.shelf.bytes_held)


async def test_without_a_model_every_call_is_unsupported() -> None:
    async with started(QUICK) as world:
        for image in (RED, b"", None):
            refused = await world.refusal(image)
            assert isinstance(refused, Unsupported)
            assert "encoder.model_path" in refused.message


async def test_an_encoder_announces_the_digest_of_what_it_has_loaded(
    siglip: Path, tmp_path: Path
) -> None:
    async def tower(folder: Path) -> str:
        async with started(settings(folder)) as world:
            announced = world.encoder.service.report().tower
            assert (await world.ask(RED)).tower == announced
            return announced

    one, two = await tower(siglip), tower_copy(siglip, tmp_path / "two")
    assert len(one) == 64
    assert await tower(two) == one, "the folder's name is not in it"
    file = two / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {"language_model.head": torch.ones(3)}, file)
    assert await tower(two) == one, "no encoder reads the text model"
    name = next(name for name in sorted(weights) if name.endswith("fc1.weight"))
    save_file(weights | {name: weights[name] + 1}, file)
    other = await tower(two)
    assert other != one
    config = two / "config.json"
    config.write_bytes(config.read_bytes() + b"\n")
    assert await tower(two) not in {one, other}


def tower_copy(folder: Path, copy: Path) -> Path:
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


@pytest.mark.parametrize(
    ("limits", "complaint"),
    [({}, r"config\.json: No such file"), ({"claims_bytes_max": 255}, "must be at least 256")],
)
async def test_a_model_that_cannot_serve_keeps_it_from_starting(
    siglip: Path, tmp_path: Path, limits: dict[str, float], complaint: str
) -> None:
    chosen = settings(siglip if limits else tmp_path, **limits)
    with pytest.raises(ExceptionGroup) as caught:
        async with started(chosen):
            pass
    assert caught.group_contains(CannotStart, match=complaint)


@pytest.mark.parametrize(
    ("fields", "embedding", "memory", "size"),
    [
        ({}, 9, 64_000, 256),
        ({}, 235, 64_000, 4 * 235),
        ({}, 235, 4_000, 500),
        ({}, 235, 800, 256),
        ({"cache_bytes_max": 7 * 1024**2}, 235, 64_000, 7),
    ],
)
def test_the_cache_has_room_for_the_largest_images(
    fields: dict[str, int], embedding: int, memory: int, size: int
) -> None:
    """Sizes in MiB."""
    found = cache_bytes_max(replace(EncoderConfig(), **fields), embedding << 20, memory << 20)
    assert found == size << 20


@pytest.mark.parametrize(("threads", "computing"), [(None, 5), (2, 2)])
def test_an_encoder_alone_computes_on_all_cores(
    threads: int | None, computing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vision, "detect_device", lambda: HostDevice("cpu", 5, 0))
    vision.set_threads(replace(QUICK, encoder=replace(EncoderConfig(), threads=threads)))
    assert torch.get_num_threads() == computing
