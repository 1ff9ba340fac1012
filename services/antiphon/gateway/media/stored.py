"""Media in the gateway's store, and those that several prompts of one body have."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from antiphon.gateway.requests.generation_request import MediumSource
    from antiphon.transfer.blobs import BlobStore
    from antiphon.wire.claim import Claim, PixelLimits
    from antiphon.wire.media import MediumHeader

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
