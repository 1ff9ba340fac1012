"""The claim check: how bytes too large for the broker are handed over."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from antiphon.wire.base import Value


class Claim(Value):
    """A claim check: bytes that wait at a TCP address instead of travelling over the broker.

    Attributes:
        address: `host:port` of the process that holds them.
        token: Names the bytes there; unguessable.
        digest: SHA-256, verified by whoever fetches.
        expires_unix_ms: After this the holder may have dropped them.
    """

    address: str
    token: str
    size_bytes: Annotated[int, Meta(ge=0)]
    digest: bytes
    expires_unix_ms: int
