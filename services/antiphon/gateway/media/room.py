"""Room for the media of requests in their gateway's store, taken before their bytes come."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Self

from antiphon.wire.errors import InvalidRequest, Overloaded, RequestTooLarge

if TYPE_CHECKING:
    from antiphon.transfer.blobs import BlobStore
    from antiphon.wire.claim import Claim

WAIT_S = 5.0
"""How long a medium waits for room, at most and in all. What fits meanwhile passes by."""
VIDEOS_LEAVE = 4
"""Requests with videos leave one part of so many of the store to the others."""
_PAUSE_S = 0.05


class RequestRoom:
    """The room that one request takes: of media that it waits for, and of those that have come.

    Attributes:
        taken: Bytes of both.
    """

    def __init__(self, store: BlobStore, *, videos: bool = False) -> None:
        self.store = store
        self.taken = 0
        self._leaving = store.bytes_max // VIDEOS_LEAVE if videos else 0

    def medium(self, bytes_max: int) -> MediumRoom:
        """Room for one more medium, of at most so many bytes. None is taken yet."""
        return MediumRoom(self, bytes_max)

    async def take(self, size_bytes: int, wait_s: float) -> None:
        total, most = self.taken + size_bytes, self.store.bytes_max - self._leaving
        if total > most:
            raise InvalidRequest(
                f"the media of the request may have {total} bytes; the limit is {most} bytes"
            )
        self.taken += size_bytes  # of others of this request, too, which wait at the same time
        try:
            async with asyncio.timeout(wait_s):
                # Blobs expire, too.
                while not self.store.reserve(size_bytes, self._leaving):  # noqa: ASYNC110
                    await asyncio.sleep(_PAUSE_S)
        except BaseException as error:
            self.taken -= size_bytes
            if isinstance(error, TimeoutError):
                text = f"there is no room for {size_bytes} bytes among the media of open requests"
                raise Overloaded(f"{text}; retry later", retry_after_s=WAIT_S) from error
            raise

    def give_back(self, size_bytes: int) -> None:
        self.store.release(size_bytes)
        self.taken -= size_bytes


class MediumRoom:
    """The room for one medium on its way. What is left of it at the end is given back.

    Attributes:
        taken: Bytes that there is room for.
    """

    def __init__(self, request: RequestRoom, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.taken = 0
        self._request = request
        self._wait_s = WAIT_S

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._give_back()

    def check(self, size_bytes: int) -> None:
        """Compare a size with that of such media.

        Raises:
            RequestTooLarge: It is larger.
        """
        if size_bytes > self.bytes_max:
            raise RequestTooLarge.of(size_bytes=size_bytes, bytes_max=self.bytes_max)

    async def take(self, size_bytes: int) -> None:
        """Take more room for bytes that are still to come; others have to leave for it, if need be.

        Raises:
            InvalidRequest: There never can be as much for one request.
            Overloaded: There was none in time.
        """
        began = time.monotonic()
        await self._request.take(size_bytes, self._wait_s)
        self._wait_s -= time.monotonic() - began
        self.taken += size_bytes

    def put(
        self,
        data: bytes | bytearray,
        lifetime_s: float,
        *,
        checksum: bytes,
        part_bytes: int = 0,
        part_digests: bytes = b"",
    ) -> Claim:
        """Store the bytes that have come, for which room was taken: see `BlobStore.put`."""
        self._give_back()
        claim = self._request.store.put(
            data, lifetime_s, checksum=checksum, part_bytes=part_bytes, part_digests=part_digests
        )
        self._request.taken += len(data)
        return claim

    def _give_back(self) -> None:
        self._request.give_back(self.taken)
        self.taken = 0
