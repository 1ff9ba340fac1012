"""Media of requests on their way in: fetched, hashed, checked, and held until the request ends."""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from antiphon.gateway.media.fetch import MediaFetcher
from antiphon.gateway.media.header import FORMATS, read_header
from antiphon.service.startup import address_for_others, bind
from antiphon.service.tasks import gather
from antiphon.telemetry import catalog
from antiphon.transfer.blobs import BlobServer, BlobStore
from antiphon.wire.claim import PixelLimits
from antiphon.wire.errors import InvalidRequest, RequestTooLarge
from antiphon.wire.media import Medium, MediumHeader

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from antiphon.config.gateway import MediaConfig
    from antiphon.gateway.requests.generation_request import MediumSource
    from antiphon.service.service import Runtime
    from antiphon.wire.claim import Claim
    from antiphon.wire.media import MediumSpan

LINGER_S = 30.0
"""How long media are held behind a request's deadline, at most."""
_INLINE_BYTES = 256 * 1024
"""More than this is hashed in a thread."""


@dataclass(frozen=True, slots=True)
class _StoredMedium:
    header: MediumHeader
    claim: Claim


class HeldMedia:
    """The media of one request, in order. They are held until `discard`, or for some time."""

    def __init__(self, store: BlobStore, held: Sequence[_StoredMedium]) -> None:
        self.headers = tuple(each.header for each in held)
        self._store = store
        self._claims = tuple(each.claim for each in held)

    def placed(self, spans: Sequence[MediumSpan]) -> tuple[Medium, ...]:
        """The media with their places in the prompt."""
        return tuple(
            Medium(
                span=span,
                width=header.width,
                height=header.height,
                claim=claim,
                limits=header.limits,
            )
            for span, header, claim in zip(spans, self.headers, self._claims, strict=True)
        )

    def discard(self) -> None:
        for claim in self._claims:
            self._store.discard(claim)


class MediaIntake:
    """Fetches and checks media, and serves their bytes to encoders."""

    def __init__(self, config: MediaConfig, store: BlobStore, pixels_max: int) -> None:
        self._config = config
        self._store = store
        self._pixels_max = pixels_max
        self._fetcher = MediaFetcher(config)

    @staticmethod
    @asynccontextmanager
    async def lifespan(runtime: Runtime) -> AsyncGenerator[MediaIntake]:
        config = runtime.settings.media
        with bind(config.host, config.port) as bound:
            address = address_for_others(bound, config.host, config.advertise_host)
            store = BlobStore(address, config.store_bytes_max, runtime.clock)
            server = runtime.group.create_task(BlobServer(bound, store).run(), name="media")
            runtime.metrics.gauge(catalog.MEDIA_BYTES).set_function(lambda: store.bytes_held)
            intake = MediaIntake(config, store, runtime.settings.encoder.pixels_max)
            try:
                yield intake
            finally:
                server.cancel()
                await intake.close()

    async def close(self) -> None:
        await self._fetcher.close()

    async def open(
        self,
        sources: Sequence[MediumSource],
        lifetime_s: float,
        limits: PixelLimits | None = None,
    ) -> HeldMedia:
        """Fetch the media of a request, each URL once.

        Raises:
            InvalidRequest: There are too many, or one cannot be fetched, is no image, or is too
                large; `param` names the part.
            Overloaded: The media of open requests take too much memory.
        """
        if len(sources) > self._config.images_max:
            limit = self._config.images_max
            raise InvalidRequest(
                f"the request has {len(sources)} images; the limit is {limit}",
                param=sources[limit].param,
            )
        limits = self._with_defaults(limits or PixelLimits())
        first = {each.source: each for each in reversed(sources)}
        held: dict[str | bytes, _StoredMedium] = {}

        async def hold(source: MediumSource) -> None:
            held[source.source] = await self._hold(source, lifetime_s + LINGER_S, limits)

        try:
            await gather([hold(each) for each in first.values()])
        except BaseException:
            HeldMedia(self._store, [*held.values()]).discard()
            raise
        return HeldMedia(self._store, [held[each.source] for each in sources])

    def _with_defaults(self, limits: PixelLimits) -> PixelLimits | None:
        """Fill in the limits that a request does not set; None if the model's hold alone."""
        least = limits.least or self._config.pixels_min
        most = limits.most or self._config.pixels_max
        return PixelLimits(least=least, most=most) if least or most else None

    async def _hold(
        self, source: MediumSource, lifetime_s: float, limits: PixelLimits | None
    ) -> _StoredMedium:
        """Fetch a medium into the store: its bytes count while others of a request are fetched."""
        try:
            data = await self._fetcher.fetch(source.source)
            if len(data) > _INLINE_BYTES:
                digest = await asyncio.to_thread(hashlib.sha256, data)
            else:
                digest = hashlib.sha256(data)
            header = self._checked(data, digest.digest(), limits)
            return _StoredMedium(header, self._store.put(data, lifetime_s, checksum=header.digest))
        except RequestTooLarge as error:
            size, most = error.details["size_bytes"], error.details["bytes_max"]
            text = f"the image has {size} bytes; the limit is {most} bytes"
            raise InvalidRequest(text, param=source.param) from error
        except InvalidRequest as error:
            error.param = source.param
            raise

    def _checked(self, data: bytes, digest: bytes, limits: PixelLimits | None) -> MediumHeader:
        header = read_header(data)
        if header is None:
            raise InvalidRequest(f"not an image of a known format ({', '.join(FORMATS)})")
        if (pixels := header.width * header.height) > self._pixels_max:
            raise InvalidRequest(
                f"the image has {pixels} pixels; the limit is {self._pixels_max} pixels"
            )
        return MediumHeader(digest=digest, width=header.width, height=header.height, limits=limits)
