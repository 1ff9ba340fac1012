"""The claim check: how bytes too large for the broker are handed over."""

from __future__ import annotations

from antiphon.wire.base import Value
from antiphon.wire.bounds import Count, Sha256, ShortText, UnixMs


class Claim(Value):
    """A claim check: bytes that wait at a TCP address instead of travelling over the broker.

    Attributes:
        address: `host:port` of the process that holds them.
        token: Names the bytes there; unguessable.
        digest: SHA-256, verified by whoever fetches.
        expires_unix_ms: After this the holder may have dropped them.
    """

    address: ShortText
    token: ShortText
    size_bytes: Count
    digest: Sha256
    expires_unix_ms: UnixMs
