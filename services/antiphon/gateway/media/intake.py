"""Media of requests on their way in: fetched, hashed, checked, and held until the request ends.

Prompts that are too long for messages are held beside them.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
from collections import OrderedDict
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from antiphon.gateway.media.audio_header import read_audio_header
from antiphon.gateway.media.fetch import MediaFetcher, claim_networks
from antiphon.gateway.media.header import FORMATS, read_header
from antiphon.gateway.media.room import RequestRoom
from antiphon.gateway.media.stored import (
    HeldMedia,
    HeldPrompt,
    SharedMedia,
    StoredMedium,
    medium_identity,
)
from antiphon.gateway.media.video_header import read_video_header
from antiphon.service.startup import CannotStart, address_for_others, bind
from antiphon.service.tasks import gather
from antiphon.telemetry import catalog
from antiphon.transfer.blobs import PART_BYTES, BlobServer, BlobStore, part_digests
from antiphon.transfer.blobs import fetch as fetch_claim
from antiphon.wire.claim import AudioWindow, PixelLimits, VideoHeader
from antiphon.wire.errors import InvalidRequest, RequestTooLarge
from antiphon.wire.ids import DEFAULT_TENANT
from antiphon.wire.media import MediumHeader

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator, Iterable, Sequence

    from antiphon.config.gateway import MediaConfig
    from antiphon.config.settings import EncoderConfig
    from antiphon.gateway.requests.generation_request import MediumSource
    from antiphon.service.service import Runtime
    from antiphon.wire.claim import Claim
    from antiphon.wire.ids import TenantId
    from antiphon.wire.media import EmbeddingForm, Medium, NumberType

LINGER_S = 30.0
"""How long media and prompts are held behind a request's deadline, at most."""
_INLINE_BYTES = 256 * 1024
"""More than this is hashed in a thread."""
_ITEM_BYTES: dict[NumberType, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
FPS_MAX = 10**6
LISTED_FPS = 2.0
"""Frames a second of a list of frames, if the request does not say."""
NAMES_MAX = 16_384
"""Media that are kept by their uuid: a name takes up to a kilobyte, however small its image is."""
_PARTS_MAX = 16
"""Parts of an embedding: their checksums are in each message that has its claim."""


class MediaIntake:
    """Fetches and checks media, and serves their bytes to encoders, and long prompts to workers.

    Without `serves_prompts` workers cannot be expected to reach it.
    """

    def __init__(
        self,
        config: MediaConfig,
        store: BlobStore,
        encoder: EncoderConfig,
        *,
        serves_prompts: bool = True,
    ) -> None:
        self.serves_prompts = serves_prompts
        self._config = config
        self._store = store
        self._encoder = encoder
        self._fetcher = MediaFetcher(config)
        self._named = NamedMedia(config.named_bytes_max)

    @staticmethod
    @asynccontextmanager
    async def lifespan(runtime: Runtime) -> AsyncGenerator[MediaIntake]:
        config = runtime.settings.media
        try:
            claim_networks(config)
        except ValueError as error:
            raise CannotStart(f"media.claim_networks: {error}") from error
        with bind(config.host, config.port) as bound:
            address = address_for_others(bound, config.host, config.advertise_host)
            store = BlobStore(address, config.store_bytes_max, runtime.clock)
            server = runtime.group.create_task(BlobServer(bound, store).run(), name="media")
            runtime.metrics.gauge(catalog.MEDIA_BYTES).set_function(lambda: store.bytes_held)
            intake = MediaIntake(
                config,
                store,
                runtime.settings.encoder,
                serves_prompts=is_reached(address, runtime.settings.bus.url),
            )
            try:
                yield intake
            finally:
                server.cancel()
                await intake.close()

    async def close(self) -> None:
        await self._fetcher.close()

    async def hold_prompt(self, prompt_ids: bytes, lifetime_s: float) -> HeldPrompt:
        """Hold a prompt, which is not copied.

        Raises:
            Overloaded: The media and prompts of open requests take too much memory.
        """
        checksum = await asyncio.to_thread(hashlib.sha256, prompt_ids)
        claim = self._store.put(prompt_ids, lifetime_s + LINGER_S, checksum=checksum.digest())
        return HeldPrompt(self._store, claim)

    def shared(self, prompts: Iterable[Sequence[MediumSource]]) -> SharedMedia:
        """What the prompts of one body, with these media, have in common. The caller closes it."""
        return SharedMedia(self._store, prompts)

    async def open(
        self,
        sources: Sequence[MediumSource],
        lifetime_s: float,
        limits: PixelLimits | None = None,
        tenant: TenantId = DEFAULT_TENANT,
        *,
        width: int = 0,
        shared: SharedMedia | None = None,
    ) -> HeldMedia:
        """Fetch the media of a prompt, each URL once; `width` is that of embeddings.

        What is `shared` with other prompts of its body is fetched once for all of them.

        Raises:
            InvalidRequest: There are too many, or one cannot be fetched, is not what it should be,
                is too large, or is sent by a name that is not known; `param` names the part.
            Overloaded: The media of open requests take too much memory.
        """
        videos = [each for each in sources if each.video]
        audios = [each for each in sources if each.is_audio]
        images = [each for each in sources if not each.video and not each.is_audio]
        _check_count(images, "images", self._config.images_max)
        _check_count(videos, "videos", self._config.videos_max)
        _check_count(audios, "audio files", self._config.audios_max)
        wanted = [self._limits(limits or PixelLimits(), each) for each in sources]
        sources = _resolved(sources)
        first = {medium_identity(each): each for each in reversed(sources)}
        held: dict[object, StoredMedium] = {}
        room = RequestRoom(self._store, videos=bool(videos))
        lasting_s, fps = lifetime_s + LINGER_S, 0.0 if limits is None else limits.fps

        async def fetch(source: MediumSource) -> StoredMedium:
            if source.embedding is None:
                return await self._hold(source, room, lasting_s, tenant, fps)
            return await self._hold_embedding(
                source, source.embedding, room, lasting_s, tenant, width
            )

        async def hold(source: MediumSource) -> None:
            if shared is None:
                stored = await fetch(source)
            else:
                stored = await shared.hold(source, fps, lasting_s, partial(fetch, source))
            held[medium_identity(source)] = stored

        try:
            await gather([hold(each) for each in first.values()])
        except BaseException:
            HeldMedia(self._store, [*held.values()]).discard()
            raise
        pairs = zip(sources, wanted, strict=True)
        return HeldMedia(
            self._store, [held[medium_identity(each)].scaled(limits) for each, limits in pairs]
        )

    async def take_over(self, media: Sequence[Medium], lifetime_s: float) -> HeldMedia:
        """Fetch media that another gateway holds, each once, and hold them here, too.

        Raises:
            Unavailable: It has died, or holds them no longer.
            InvalidRequest: There can never be room for them.
            Overloaded: There is none in time.
        """
        request = RequestRoom(self._store, videos=any(each.video for each in media))
        held: dict[str, StoredMedium] = {}

        async def take(medium: Medium) -> None:
            claim, config = medium.claim, self._config
            limit_s = config.fetch_timeout_s if not medium.video else config.video_fetch_timeout_s
            with request.medium(claim.size_bytes) as room:
                await room.take(claim.size_bytes)
                data = await fetch_claim(claim, timeout_s=limit_s, bytes_max=claim.size_bytes)
                stored = room.put(
                    data,
                    lifetime_s + LINGER_S,
                    checksum=claim.digest,
                    part_bytes=claim.part_bytes,
                    part_digests=claim.part_digests,
                )
            header = MediumHeader(digest=claim.digest, width=medium.width, height=medium.height)
            held[claim.token] = StoredMedium(header, stored)

        try:
            await gather([take(each) for each in {m.claim.token: m for m in media}.values()])
        except BaseException:
            HeldMedia(self._store, [*held.values()]).discard()
            raise
        return HeldMedia(self._store, [held[each.claim.token] for each in media])

    def _limits(self, limits: PixelLimits, source: MediumSource) -> PixelLimits | None:
        """Fill in the limits that a request does not set; None if the model's hold alone.

        An image of high detail has the model's maximum, whatever the operator's default.
        """
        if source.is_audio:
            return None
        if source.video:
            return None if limits == PixelLimits() else limits
        detail = source.detail
        least = limits.least or self._config.pixels_min
        most = limits.most or (0 if detail == "high" else self._config.pixels_max)
        limits = PixelLimits(least=least, most=most, low=detail == "low")
        return None if limits == PixelLimits() else limits

    async def _hold(
        self,
        source: MediumSource,
        request: RequestRoom,
        lifetime_s: float,
        tenant: TenantId,
        fps: float,
    ) -> StoredMedium:
        """Fetch a medium into the store, where its bytes count before they have come.

        `fps` is that of a video which has none: a list of frames.
        """
        most = self._config.video_bytes_max if source.video else self._config.file_bytes_max
        with _naming(source), request.medium(most) as room:
            sent = self._sent(source, tenant)
            data = await self._fetcher.fetch(sent, room, tenant, video=source.video)
            digest = source.digest or await _sha256(data)
            if source.audio is not None:
                header = MediumHeader(digest=digest, width=0, height=0, audio=source.audio)
            elif source.sound:
                header = await asyncio.to_thread(self._checked_audio, data, digest)
            elif source.video:
                header = await asyncio.to_thread(self._checked_video, data, digest, fps)
            else:
                header = self._checked(data, digest)
            claim = room.put(data, lifetime_s, checksum=header.digest)
            if source.uuid is not None:
                self._named.put(tenant, source.uuid, data)
            return StoredMedium(header, claim)

    async def _hold_embedding(
        self,
        source: MediumSource,
        form: EmbeddingForm,
        request: RequestRoom,
        lifetime_s: float,
        tenant: TenantId,
        width: int,
    ) -> StoredMedium:
        """Check what a client has embedded, and store it as encoders do their embeddings."""
        with _naming(source), request.medium(self._config.file_bytes_max) as room:
            if form.width != width:
                raise InvalidRequest(
                    f"the embedding has rows of {form.width} numbers; this model has {width}"
                )
            data = await self._fetcher.fetch(source.source, room, tenant)
            await room.take(len(data) * _ITEM_BYTES["float32"] // _ITEM_BYTES[form.dtype])
            data = await asyncio.to_thread(_float32_rows, data, form)
            part_bytes = _part_bytes(len(data), 4 * width)
            digest, digests = await asyncio.to_thread(_digests, data, part_bytes)
            claim = room.put(
                data, lifetime_s, checksum=digest, part_bytes=part_bytes, part_digests=digests
            )
            across, down = form.size or (0, 0)
            header = MediumHeader(
                digest=digest, width=across, height=down, rows=form.rows, patches=form.patches
            )
            return StoredMedium(header, claim)

    def _sent(self, source: MediumSource, tenant: TenantId) -> str | bytes | bytearray | Claim:
        """What a request has of a medium, or what had its name in an earlier one."""
        if source.source or source.uuid is None:
            return source.source
        if (data := self._named.get(tenant, source.uuid)) is None:
            raise InvalidRequest(
                f"no {source.kind} with the uuid {source.uuid!r} is kept; send it again"
            )
        return data

    def _checked(self, data: bytes | bytearray, digest: bytes) -> MediumHeader:
        header = read_header(bytes(data))
        if header is None:
            raise InvalidRequest(f"not an image of a known format ({', '.join(FORMATS)})")
        self._check_pixels("image", header.width * header.height, self._encoder.pixels_max)
        return MediumHeader(digest=digest, width=header.width, height=header.height)

    def _checked_audio(self, data: bytes | bytearray, digest: bytes) -> MediumHeader:
        """Read the header of an audio file, in a thread: it may be that of each frame."""
        kind, seconds = read_audio_header(data, self._encoder.audio_seconds_max)
        audio = AudioWindow(format=kind, seconds=seconds)
        return MediumHeader(digest=digest, width=0, height=0, audio=audio)

    def _checked_video(self, data: bytes | bytearray, digest: bytes, fps: float) -> MediumHeader:
        """Read a video's header, in a thread: its index may be long."""
        most = self._encoder
        header = read_video_header(data, most.video_frames_max)
        pixels = header.width * header.height
        self._check_pixels("video", pixels, most.pixels_max)
        self._check_pixels("video", pixels * header.frames, most.video_pixels_max)
        chosen = not header.seconds
        rate = fps or LISTED_FPS if chosen else header.frames / header.seconds
        if not 0 < rate <= FPS_MAX:
            raise InvalidRequest(f"the video has {rate:g} frames a second; the limit is {FPS_MAX}")
        seconds = header.seconds or header.frames / rate
        if seconds > most.video_seconds_max:
            raise InvalidRequest(
                f"the video takes {seconds:g} s; the limit is {most.video_seconds_max:g} s"
            )
        video = VideoHeader(frames=header.frames, fps=rate, chosen=chosen)
        return MediumHeader(digest=digest, width=header.width, height=header.height, video=video)

    @staticmethod
    def _check_pixels(kind: str, pixels: int, most: int) -> None:
        if pixels > most:
            raise InvalidRequest(f"the {kind} has {pixels} pixels; the limit is {most} pixels")


def _check_count(sources: Sequence[MediumSource], kind: str, most: int) -> None:
    if len(sources) > most:
        text = f"the request has {len(sources)} {kind}; the limit is {most}"
        raise InvalidRequest(text, param=sources[most].param)


def is_reached(address: str, bus_url: str) -> bool:
    """Whether processes of the cluster reach an address, as far as can be known here.

    One of this machine alone is reached if the broker is on this machine, too.
    """
    hosts = [urlsplit(url.strip()).hostname or "" for url in bus_url.split(",")]
    return not _is_local(address.rpartition(":")[0]) or all(map(_is_local, hosts))


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host in ("", "localhost")


async def _sha256(data: bytes | bytearray) -> bytes:
    if len(data) > _INLINE_BYTES:
        return (await asyncio.to_thread(hashlib.sha256, data)).digest()
    return hashlib.sha256(data).digest()


@contextmanager
def _naming(source: MediumSource) -> Generator[None]:
    """Errors about a medium name its part of the request."""
    try:
        yield
    except RequestTooLarge as error:
        size, most = error.details["size_bytes"], error.details["bytes_max"]
        text = f"the {source.kind} has {size} bytes; the limit is {most} bytes"
        raise InvalidRequest(text, param=source.param) from error
    except InvalidRequest as error:
        error.param = source.param
        raise


def _float32_rows(data: bytes | bytearray, form: EmbeddingForm) -> bytes:
    """Return the numbers as float32. Called in a thread.

    Raises:
        InvalidRequest: There are not as many as the form says, or one is not finite.
    """
    import numpy as np  # noqa: PLC0415  # most gateways get no embeddings

    expected = form.rows * form.width * _ITEM_BYTES[form.dtype]
    if len(data) != expected:
        raise InvalidRequest(
            f"the embedding has {len(data)} bytes; {form.rows} x {form.width} numbers in "
            f"{form.dtype} have {expected}"
        )
    if form.dtype == "bfloat16":
        values = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    else:
        kind = "<f2" if form.dtype == "float16" else "<f4"
        values = np.frombuffer(data, kind).astype("<f4", copy=False)
    if not np.isfinite(values).all():
        raise InvalidRequest("the embedding has numbers that are not finite")
    return values.tobytes()


def _part_bytes(size_bytes: int, row_bytes: int) -> int:
    """Size of the parts of an embedding, of whole rows and few; 0: it is not cut."""
    least = max(PART_BYTES, -(-size_bytes // _PARTS_MAX))
    return 0 if size_bytes <= PART_BYTES else -(-least // row_bytes) * row_bytes


def _digests(data: bytes, part_bytes: int) -> tuple[bytes, bytes]:
    """SHA-256 of all of the data, and of its parts."""
    return hashlib.sha256(data).digest(), part_digests(data, part_bytes) if part_bytes else b""


def _resolved(sources: Sequence[MediumSource]) -> Sequence[MediumSource]:
    """Put what has a uuid in a request in place of that uuid alone, in parts of the same kind."""
    named = {(each.kind, each.uuid): each for each in reversed(sources) if each.source}
    return [
        named.get((each.kind, each.uuid), each) if each.uuid and not each.source else each
        for each in sources
    ]


class NamedMedia:
    """The bytes of images that clients have named, so that they may send them again by name alone.

    Those that were used last are kept, by tenant: up to a number of bytes, and `NAMES_MAX`.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._data: OrderedDict[tuple[TenantId, str], bytes | bytearray] = OrderedDict()
        self.bytes_held = 0

    def get(self, tenant: TenantId, name: str) -> bytes | bytearray | None:
        if (data := self._data.get((tenant, name))) is not None:
            self._data.move_to_end((tenant, name))
        return data

    def put(self, tenant: TenantId, name: str, data: bytes | bytearray) -> None:
        """Keep an image in place of the one that had its name, if it fits at all."""
        if (before := self._data.pop((tenant, name), None)) is not None:
            self.bytes_held -= len(before)
        if len(data) > self._bytes_max:
            return
        self._data[tenant, name] = data
        self.bytes_held += len(data)
        while self.bytes_held > self._bytes_max or len(self._data) > NAMES_MAX:
            _, oldest = self._data.popitem(last=False)
            self.bytes_held -= len(oldest)
