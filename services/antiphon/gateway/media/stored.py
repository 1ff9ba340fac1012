"""Media and prompts in the gateway's store: those of a request, and those that a body shares."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from antiphon.wire.claim import PromptClaim
from antiphon.wire.errors import InvalidRequest
from antiphon.wire.media import Medium

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from antiphon.gateway.requests.generation_request import MediumSource
    from antiphon.transfer.blobs import BlobStore
    from antiphon.wire.claim import Claim, PixelLimits
    from antiphon.wire.media import MediumHeader, MediumSpan

HANDOVER_S = 30.0
"""How long media are held of a stream that was resumed at another gateway. By then they are there,
and workers and encoders have its claims, or they are nowhere: see `requests.renewed_media`."""

MediumIdentity = tuple[object, ...]


def medium_identity(source: MediumSource) -> MediumIdentity:
    """What sources have in common whose bytes are the same."""
    content = source.digest or source.source
    return content, source.uuid, source.embedding, source.video, source.audio, source.sound


@dataclass(frozen=True, slots=True)
class StoredMedium:
    header: MediumHeader
    claim: Claim

    def scaled(self, limits: PixelLimits | None) -> StoredMedium:
        return replace(self, header=msgspec.structs.replace(self.header, limits=limits))


class HeldMedia:
    """The media of one request, in order. They are held until `discard`, or for some time."""

    def __init__(self, store: BlobStore, held: Sequence[StoredMedium]) -> None:
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
                embedded=header.rows > 0,
                video=header.video,
                audio=header.audio,
            )
            for span, header, claim in zip(spans, self.headers, self._claims, strict=True)
        )

    def renewed(self, media: Sequence[Medium]) -> tuple[Medium, ...]:
        """Media of a request that another gateway had, with claims of this one.

        Raises:
            InvalidRequest: These are others.
        """
        if len(media) != len(self._claims):
            raise InvalidRequest(f"the request had {len(media)} media, not {len(self._claims)}")
        pairs = [*zip(media, self._claims, strict=True)]
        for index, (medium, claim) in enumerate(pairs):
            if medium.claim.digest != claim.digest:
                text = "it has other bytes than when the request began"
                raise InvalidRequest(text, param=f"media.{index}")
        return tuple(msgspec.structs.replace(medium, claim=claim) for medium, claim in pairs)

    def discard(self) -> None:
        claims, self._claims = self._claims, ()
        for claim in claims:
            self._store.discard(claim)

    def hand_over(self) -> None:
        """Discard them as soon as the gateway that has adopted their request can hold them."""
        asyncio.get_running_loop().call_later(HANDOVER_S, self.discard)


class HeldPrompt:
    """The ids of one request's prompt. They are held until `discard`, or for some time."""

    def __init__(self, store: BlobStore, claim: Claim) -> None:
        self.claim = PromptClaim(claim=claim)
        self._store = store

    def discard(self) -> None:
        self._store.discard(self.claim.claim)


class SharedMedia:
    """Media that several prompts of one body have: fetched once, and held once, until `close`.

    One that no prompt holds at the moment stays for the next prompt that has it, unless others need
    its room: then it is fetched again.
    """

    def __init__(self, store: BlobStore, prompts: Iterable[Sequence[MediumSource]]) -> None:
        found = Counter(each for media in prompts for each in {*map(medium_identity, media)})
        self._store = store
        self._fetching = {each: asyncio.Lock() for each, count in found.items() if count > 1}
        self._stored: dict[tuple[MediumIdentity, float], StoredMedium] = {}

    async def hold(
        self,
        source: MediumSource,
        fps: float,
        lifetime_s: float,
        fetch: Callable[[], Awaitable[StoredMedium]],
    ) -> StoredMedium:
        """Hold a medium for one more prompt, so long; `fetch` brings it if it is not here.

        `fps` is a part of the header of a list of frames.
        """
        identity = medium_identity(source)
        if (fetching := self._fetching.get(identity)) is None:
            return await fetch()
        async with fetching:
            before = self._stored.get((identity, fps))
            claim = None if before is None else self._store.share(before.claim, lifetime_s)
            if before is not None and claim is not None:
                return replace(before, claim=claim)
            stored = self._stored[identity, fps] = await fetch()
            self._store.keep(stored.claim)
            return stored

    def close(self) -> None:
        for stored in self._stored.values():
            self._store.forget(stored.claim)
