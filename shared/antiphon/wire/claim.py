"""Claim checks: transfer of payloads too large for the broker."""

from __future__ import annotations

from antiphon.wire.base import Value
from antiphon.wire.bounds import Count, Sha256, ShortText, UnixMs


class Claim(Value):
    """A claim check: bytes to fetch from a TCP address instead of through the broker.

    Attributes:
        address: `host:port` of the process that holds them.
        token: Identifies the bytes there; unguessable.
        digest: SHA-256, verified by the fetching process.
        expires_unix_ms: After this time the bytes may have been dropped.
    """

    address: ShortText
    token: ShortText
    size_bytes: Count
    digest: Sha256
    expires_unix_ms: UnixMs
