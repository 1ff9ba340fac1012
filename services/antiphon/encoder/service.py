"""Connects the vision model to the bus: images in, claims on their embeddings out.

Torch and modules that need it are imported only if a model is configured.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from antiphon.config.errors import ConfigError
from antiphon.encoder.cache import AudioFiles, CachedEmbedding, DecodeJob, Embedder, EmbeddingCache
from antiphon.model_card.audio import PromptAudio, read_audio, read_prompt_audio
from antiphon.model_card.served_model import model_files, served_name
from antiphon.model_card.vision.vision_card import read_vision
from antiphon.resolve.device import detect_device
from antiphon.service.clock import check
from antiphon.service.endpoint import Endpoint, RequestEndpoint
from antiphon.service.service import Report, Runtime
from antiphon.service.startup import CannotStart, address_for_others, bind
from antiphon.service.tasks import repeat
from antiphon.service.tenant_slots import TenantSlots
from antiphon.telemetry import catalog
from antiphon.telemetry.metrics import Metrics, RunningTotal
from antiphon.transfer.blobs import (
    PART_BYTES,
    BlobServer,
    BlobStore,
    fetch,
    medium_lost,
    part_digests,
)
from antiphon.wire.base import Role
from antiphon.wire.claim import Claim, EncodeImage, ImageEmbedding
from antiphon.wire.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    RequestTooLarge,
    Unsupported,
)
from antiphon.wire.routes import ENCODE_IMAGE

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Sequence

    from antiphon.config.settings import EncoderConfig, Settings
    from antiphon.encoder.audio import DecodedAudio
    from antiphon.encoder.audio_model import AudioModel
    from antiphon.encoder.decode_process import DecodeProcesses
    from antiphon.encoder.model import VisionModel
    from antiphon.encoder.preprocess import DecodedImage
    from antiphon.wire.claim import VideoHeader
    from antiphon.wire.ids import ModelName, TenantId

log = logging.getLogger(__name__)

_NUMBER_BYTES = 4
"""Embeddings are float32."""
_FETCH_S = 25.0
"""Less than a worker waits for an answer, which says that the owner of the medium is not reached.
"""
_DECODE_S = 600.0
"""Maximum wait for a child and its result; a child has less for one medium."""
_CACHED_MIN = 4
"""How many of a model's largest embeddings are cached, if memory allows for it."""
_MEMORY_PARTS = 8
_CACHE_BYTES_MIN = 256 * 1024**2
_AUDIO_FILES = 4
"""How many of the largest audio files are kept between their parts."""


class EncoderService:
    """Embeds images; without a vision model it answers `unsupported`."""

    role: ClassVar = Role.ENCODER

    def __init__(self, runtime: Runtime, images: ImageEncoder | None) -> None:
        self._runtime = runtime
        self._images = images
        self._served = served_name(runtime.settings)
        self._in_flight = 0

    @staticmethod
    @asynccontextmanager
    async def lifespan(runtime: Runtime) -> AsyncGenerator[EncoderService]:
        config = runtime.settings.encoder
        folder = await asyncio.to_thread(_vision_folder, runtime.settings)
        if folder is None:
            yield EncoderService(runtime, None)
            return
        model, tower = await asyncio.to_thread(_open, runtime.settings, folder)
        with (
            bind(config.host, config.port) as bound,
            ThreadPoolExecutor(1, thread_name_prefix="embed") as thread,
        ):
            address = address_for_others(bound, config.host, config.advertise_host)
            shelf = BlobStore(address, config.claims_bytes_max, runtime.clock)
            # A worker that needs a result again calls again, and mostly finds it in the cache.
            runtime.group.create_task(BlobServer(bound, shelf, sent=shelf.spare).run())
            runtime.group.create_task(repeat(shelf.sweep, config.claim_s))
            processes = _decode_processes(model, config)
            async with processes.images, processes.videos:
                images = ImageEncoder(runtime, model, tower, processes, thread, shelf)
                yield EncoderService(runtime, images)

    def endpoints(self) -> Sequence[Endpoint]:
        here = {"encoder": self._runtime.process.instance}
        return (
            RequestEndpoint(
                route=ENCODE_IMAGE, handler=self._encode, address=here, admits_all=True
            ),
        )

    def model(self) -> ModelName | None:
        return None if self._images is None else self._served

    def report(self) -> Report:
        tower = "" if self._images is None else self._images.tower
        return Report(load=self._in_flight, tower=tower)

    async def drain(self) -> None:
        """Do nothing: a caller that finds a result gone uses another encoder."""

    async def _encode(self, request: EncodeImage, _: object) -> ImageEmbedding:
        if self._images is None:
            raise Unsupported("this model takes no media, and encoder.model_path is not set")
        self._images.metrics.received.inc()
        left_s = check(request, self._runtime.clock)
        self._in_flight += 1
        try:
            async with asyncio.timeout(left_s):
                return await self._images.embed(request)
        except TimeoutError:
            raise DeadlineExceeded("the image was not embedded in time") from None
        finally:
            self._in_flight -= 1


class ImageEncoder:
    """Embeds the images of requests, and stores the results for their callers to fetch.

    Tenants take turns, from before the fetch of a medium to each step of its tower.

    Attributes:
        tower: The digest of the model, in which all of its embeddings agree.
    """

    def __init__(
        self,
        runtime: Runtime,
        model: VisionModel | AudioModel,
        tower: str,
        processes: DecodeProcesses,
        thread: Executor,
        shelf: BlobStore,
    ) -> None:
        self.tower = tower
        self._config = runtime.settings.encoder
        self._clock = runtime.clock
        self._recipe = None if model.preprocess is None else model.preprocess.recipe
        self._videos = model.videos
        self._audio = model.audio
        self._files = AudioFiles(_AUDIO_FILES * self._config.image_bytes_max)
        self._width = model.width
        self._processes = processes
        self._shelf = shelf
        memory_bytes = detect_device().memory_bytes
        bytes_max = cache_bytes_max(self._config, model.embedding_bytes, memory_bytes)
        self._cache = EmbeddingCache(bytes_max)
        slots = runtime.settings.service.slots
        self._calls = TenantSlots(slots)
        self._video_calls: Counter[TenantId] = Counter()
        self._video_calls_max = -(-slots // 2)
        self.metrics = EncoderMetrics(runtime.metrics, self._cache)

        def steps(image: DecodedImage | DecodedAudio) -> Iterator[CachedEmbedding | None]:
            took_s, began = 0.0, self._clock.now()
            for embedding in model.steps(image):
                made = None if embedding is None else _parted(embedding)
                took_s += self._clock.now() - began
                if made is not None:
                    self.metrics.embed_seconds.observe(took_s)
                yield made
                began = self._clock.now()

        self._embedder = Embedder(steps, self._cache, thread, runtime.group)

    async def embed(self, request: EncodeImage) -> ImageEmbedding:
        digest = _digest(request)
        # What it is scaled to is a part of what is cached.
        key = digest + self._processed(request)
        self.metrics.looked_up.inc()
        embedding = self._cache.get(key)
        cached = embedding is not None
        if embedding is None:
            prepare = partial(self._pixels, request)
            # Videos take no slots of images.
            images, tenant = request.video is None, request.tenant
            async with self._calls.held(tenant) if images else self._video_call(tenant):
                embedding = await self._embedder.embed(key, prepare, tenant)
        self.metrics.answered(embedding.tokens, cached=cached)
        return ImageEmbedding(
            request_id=request.request_id,
            content_digest=digest,
            tokens=embedding.tokens,
            hidden=embedding.hidden,
            dtype="float32",
            claim=self._claim(embedding),
            cached=cached,
            tower=self.tower,
        )

    def _processed(self, request: EncodeImage) -> bytes:
        """What of a medium the model gets, beside its content; empty: what most requests want.

        Raises:
            Unsupported: The model takes none of this kind.
            InvalidRequest: See `_seen`; or audio is longer or shorter than what the model takes.
        """
        if (request.audio is not None) != (self._recipe is None):
            kind = "images" if request.audio is None else "audio"
            raise Unsupported(f"this model takes no {kind}")
        if request.video is not None:
            return repr(self._seen(request, request.video)).encode()
        if self._recipe is None:
            assert request.audio is not None, "checked above"
            if isinstance(self._audio, PromptAudio):
                self._audio.rows(request.audio.seconds - request.audio.start_s)
            return repr(request.audio).encode()
        recipe = self._recipe.within(request.limits)
        return b"" if recipe == self._recipe else repr(recipe).encode()

    def _seen(self, request: EncodeImage, video: VideoHeader) -> tuple[list[int], tuple[int, int]]:
        """Which frames of a video are seen, and their width and height.

        Raises:
            Unsupported: The model takes no videos.
            InvalidRequest: It cannot be within its limits, or its embedding is larger than all that
                may wait to be fetched.
        """
        if self._videos is None:
            raise Unsupported("this model takes no videos")
        size = request.width, request.height
        if not all(size):
            raise InvalidRequest("a video requires its width and height")
        size_bytes = self._videos.tokens(*size, video, request.limits) * self._width * _NUMBER_BYTES
        if size_bytes > self._config.claims_bytes_max:
            raise InvalidRequest(
                f"the embedding of the video has {size_bytes} bytes; the limit is "
                f"{self._config.claims_bytes_max} bytes"
            )
        return self._videos.chosen(*size, video, request.limits)

    @asynccontextmanager
    async def _video_call(self, tenant: TenantId) -> AsyncGenerator[None]:
        """A call that waits for a video. Those for images have slots for themselves.

        Raises:
            Overloaded: There are too many, and the tenant has one.
        """
        calls = self._video_calls
        if (waiting := calls.total()) >= self._video_calls_max and calls[tenant]:
            text = f"{waiting} calls wait for videos of this encoder"
            raise Overloaded(f"{text}; retry later", retry_after_s=1.0)
        calls[tenant] += 1
        try:
            yield
        finally:
            calls[tenant] -= 1
            if not calls[tenant]:
                del calls[tenant]

    @asynccontextmanager
    async def _pixels(self, request: EncodeImage) -> AsyncGenerator[DecodedImage | DecodedAudio]:
        # A video is large, as a file and as frames.
        slots = self._processes.video_slots
        async with slots.held(request.tenant) if request.video is not None else nullcontext():
            yield await self._decoded(request)

    async def _decoded(self, request: EncodeImage) -> DecodedImage | DecodedAudio:
        """Fetch and decode a medium, for longer than the call that was the first, if need be."""
        image = await self._medium(request)
        job = DecodeJob(request.width, request.height, request.limits, request.video)
        with self.metrics.decode_seconds.time():
            if request.audio is None:
                return await self._processes.decode(
                    image, job, timeout_s=_DECODE_S, tenant=request.tenant
                )
            audio = await self._processes.decode_audio(
                image, request.audio, timeout_s=_DECODE_S, tenant=request.tenant
            )
        assert self._audio is not None, "checked by _processed"
        end_s = request.audio.start_s + self._audio.features.chunk_length
        if request.claim is not None and end_s < request.audio.seconds:
            self._files.keep(request.claim.digest, image)
        return audio

    async def _medium(self, request: EncodeImage) -> bytes | bytearray:
        """The bytes of a medium; those of an audio file may be here from its part before."""
        most = self._config
        bytes_max = most.image_bytes_max if request.video is None else most.video_bytes_max
        if (claim := request.claim) is None:
            assert request.image is not None, "checked by _digest"
            if len(request.image) > bytes_max:
                raise RequestTooLarge.of(size_bytes=len(request.image), bytes_max=bytes_max)
            return request.image
        if (kept := self._files.take(claim.digest)) is not None:
            return kept
        with self.metrics.fetch_seconds.time(), medium_lost():
            return await fetch(claim, timeout_s=_FETCH_S, bytes_max=bytes_max)

    def _claim(self, embedding: CachedEmbedding) -> Claim:
        """Store an embedding for fetching; calls within half of `claim_s` share the claim."""
        claim, wait_s = embedding.claim, self._config.claim_s
        if claim is not None and self._shelf.left_s(claim) >= wait_s / 2:
            self._shelf.retain(claim)
        else:
            claim = self._shelf.put(
                embedding.data,
                wait_s,
                checksum=embedding.checksum,
                part_bytes=embedding.part_bytes,
                part_digests=embedding.part_digests,
            )
            embedding.claim = claim
        return claim


def _parted(embedding: CachedEmbedding) -> CachedEmbedding:
    """Cut a large embedding into parts, which workers fetch as they need them."""
    row_bytes = embedding.hidden * _NUMBER_BYTES
    embedding.part_bytes = max(1, PART_BYTES // row_bytes) * row_bytes
    if len(embedding.data) <= embedding.part_bytes:
        embedding.part_bytes = 0
    else:
        embedding.part_digests = part_digests(embedding.data, embedding.part_bytes)
    return embedding


def cache_bytes_max(config: EncoderConfig, embedding_bytes: int, memory_bytes: int) -> int:
    """The size of the cache, as it is set, or by the model's largest embedding and free memory."""
    if config.cache_bytes_max is not None:
        return config.cache_bytes_max
    largest = min(_CACHED_MIN * embedding_bytes, memory_bytes // _MEMORY_PARTS)
    return max(_CACHE_BYTES_MIN, largest)


def _digest(request: EncodeImage) -> bytes:
    """Return the digest of the image. A claim contains it; `fetch` verifies it."""
    if (request.image is None) == (request.claim is None):
        raise InvalidRequest("give exactly one of image and claim", param="image")
    if request.claim is not None:
        return request.claim.digest
    return hashlib.sha256(request.image or b"").digest()


def _vision_folder(settings: Settings) -> Path | None:
    """The folder of `encoder.model_path`, or of the served model, if that takes media.

    Raises:
        CannotStart: There is no such model.
    """
    if settings.encoder.model_path:
        return Path(settings.encoder.model_path).expanduser()
    try:
        folder = model_files(settings, weights=False).folder
        if not (read_vision(folder) or read_audio(folder) or read_prompt_audio(folder)):
            return None
        return model_files(settings).folder
    except ConfigError as error:
        raise CannotStart(str(error)) from error


def _decode_processes(model: VisionModel | AudioModel, config: EncoderConfig) -> DecodeProcesses:
    # Pillow is only installed where images are served.
    from antiphon.encoder.decode_process import DecodeProcesses, DecodeSettings  # noqa: PLC0415

    images = None if model.preprocess is None else model.preprocess.recipe
    videos = None if model.videos is None else model.videos.recipe
    audio = None if model.audio is None else model.audio.features
    return DecodeProcesses(DecodeSettings(images, config.pixels_max, videos, audio), config)


def _open(settings: Settings, folder: Path) -> tuple[VisionModel | AudioModel, str]:
    """Load the model, and return its digest, too. Imports take seconds, so they are done here.

    Raises:
        CannotStart: The packages are not installed, or the folder has no supported model.
    """
    try:
        from antiphon.encoder.audio_model import open_audio_model  # noqa: PLC0415
        from antiphon.encoder.model import open_model, set_threads  # noqa: PLC0415
        from antiphon.encoder.tower_digest import recorded  # noqa: PLC0415
    except ImportError as error:
        raise CannotStart(f"media require the extra antiphon[encoder]: {error}") from error
    try:
        with recorded() as digest:
            if (card := read_audio(folder) or read_prompt_audio(folder)) is None:
                model = open_model(settings, folder)
            else:
                set_threads(settings)
                model = open_audio_model(folder, card, settings.model.dtype)
        tower = digest.hexdigest(folder)
    except ConfigError as error:
        named = "encoder.model_path" if settings.encoder.model_path else "model.path"
        raise CannotStart(f"{named}: {error}") from error
    limit = settings.encoder.claims_bytes_max
    if model.embedding_bytes > limit:
        raise CannotStart(
            f"encoder.claims_bytes_max = {limit}: must be at least {model.embedding_bytes}, the "
            "bytes of one embedding"
        )
    log.info("tower opened", extra={"digest": tower})
    return model, tower


class EncoderMetrics:
    def __init__(self, metrics: Metrics, cache: EmbeddingCache) -> None:
        self._cache = cache
        self.received = metrics.counter(catalog.ENCODER_RECEIVED)
        self._answered = metrics.counter(catalog.ENCODER_REQUESTS)
        self.looked_up = metrics.counter(catalog.ENCODER_FILES)
        self._hits = metrics.counter(catalog.ENCODER_HITS)
        self._tokens = metrics.counter(catalog.ENCODER_TOKENS)
        self._hit_tokens = metrics.counter(catalog.ENCODER_HIT_TOKENS)
        self._evictions = RunningTotal(metrics.counter(catalog.ENCODER_EVICTIONS))
        self.fetch_seconds = metrics.histogram(catalog.ENCODER_FETCH_SECONDS)
        self.decode_seconds = metrics.histogram(catalog.ENCODER_DECODE_SECONDS)
        self.embed_seconds = metrics.histogram(catalog.ENCODER_SECONDS)
        metrics.gauge(catalog.ENCODER_CACHE_BYTES).set_function(lambda: cache.bytes_held)
        metrics.gauge(catalog.ENCODER_ENTRIES).set_function(lambda: len(cache))

    def answered(self, tokens: int, *, cached: bool) -> None:
        self._answered.inc()
        self._tokens.inc(tokens)
        if cached:
            self._hits.inc()
            self._hit_tokens.inc(tokens)
        self._evictions.follow(self._cache.evictions)
