"""Store of blobs to be fetched, bounded in size and time."""

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
    """Source of the blobs of a `BlobServer`."""

    def get(self, token: str) -> bytes | bytearray | memoryview | None:
        """Return the bytes of a token, or None if unknown or expired."""
        ...


@dataclass(frozen=True, slots=True)
class Blob:
    """Bytes and their expiry time."""

    data: bytes
    expires_unix_ms: int


class BlobStore:
    """Holds bytes under unguessable tokens until they expire.

    Args:
        address: `host:port` of the blob server that serves this store.
        bytes_max: Maximum bytes of all blobs.
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
        """Bytes stored now."""
        return self._bytes

    def put(self, data: bytes, lifetime_s: float, *, checksum: bytes | None = None) -> Claim:
        """Store bytes and return the claim to fetch them.

        Args:
            data: The bytes, which are not copied.
            lifetime_s: How long they stay available.
            checksum: Their SHA-256, if known: hashing megabytes here would block the event loop.

        Raises:
            RequestTooLarge: They would not fit into an empty store.
            Overloaded: The store is full of unexpired blobs.
        """
        if len(data) > self._bytes_max:
            raise RequestTooLarge.of(size_bytes=len(data), bytes_max=self._bytes_max)
        self.sweep()
        if self._bytes + len(data) > self._bytes_max:
            raise Overloaded("the transfer store is full; retry later", retry_after_s=1.0)
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
        """Return the bytes of a token, unless expired."""
        blob = self._blobs.get(token)
        if blob is None or blob.expires_unix_ms < self._unix_ms():
            return None
        return blob.data

    def sweep(self) -> None:
        """Drop expired blobs."""
        now = self._unix_ms()
        for token in [t for t, blob in self._blobs.items() if blob.expires_unix_ms < now]:
            self._bytes -= len(self._blobs.pop(token).data)
