"""What waits to be fetched: bounded in bytes, and only for a while."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from antiphon.transfer.protocol import new_token
from antiphon.wire.claim import Claim
from antiphon.wire.errors import Overloaded, RequestTooLarge

if TYPE_CHECKING:
    from collections.abc import Callable


class BlobSource(Protocol):
    """Where a blob server finds what a token names."""

    def get(self, token: str) -> bytes | bytearray | memoryview | None:
        """Return the bytes, or None if they are not here or not any more."""
        ...


@dataclass(frozen=True, slots=True)
class Blob:
    """Bytes and until when they are promised."""

    data: bytes
    expires_unix_ms: int


class BlobStore:
    """Holds bytes under unguessable tokens until they expire.

    Args:
        address: `host:port` of the blob server that serves this shelf.
        unix_ms: The wall clock.
    """

    def __init__(self, address: str, bytes_max: int, unix_ms: Callable[[], int]) -> None:
        self._address = address
        self._bytes_max = bytes_max
        self._unix_ms = unix_ms
        self._blobs: dict[str, Blob] = {}
        self._bytes = 0

    @property
    def bytes_held(self) -> int:
        """Bytes that wait now."""
        return self._bytes

    def put(self, data: bytes, lifetime_s: float, *, checksum: bytes | None = None) -> Claim:
        """Take bytes and return the claim that fetches them.

        Args:
            data: Not copied.
            lifetime_s: How long they are promised.
            checksum: Their SHA-256, if the caller has it: megabytes would hold up the event loop.

        Raises:
            RequestTooLarge: They would not fit even on an empty shelf.
            Overloaded: The shelf is full of what has not expired.
        """
        if len(data) > self._bytes_max:
            raise RequestTooLarge.of(size_bytes=len(data), bytes_max=self._bytes_max)
        self.sweep()
        if self._bytes + len(data) > self._bytes_max:
            raise Overloaded("too much waits to be fetched", retry_after_s=1.0)
        token = new_token()
        expires = self._unix_ms() + int(lifetime_s * 1000)
        self._blobs[token] = Blob(data, expires)
        self._bytes += len(data)
        return Claim(
            address=self._address,
            token=token,
            size_bytes=len(data),
            digest=checksum or hashlib.sha256(data).digest(),
            expires_unix_ms=expires,
        )

    def get(self, token: str) -> bytes | None:
        """Return what a token names, unless it has expired."""
        blob = self._blobs.get(token)
        if blob is None or blob.expires_unix_ms < self._unix_ms():
            return None
        return blob.data

    def sweep(self) -> None:
        """Drop what has expired."""
        now = self._unix_ms()
        for token in [t for t, blob in self._blobs.items() if blob.expires_unix_ms < now]:
            self._bytes -= len(self._blobs.pop(token).data)
