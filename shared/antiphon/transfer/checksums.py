"""The checksum of stored pages: see docs/decisions/0049."""

from __future__ import annotations

from blake3 import blake3


def page_checksum(data: bytes | bytearray | memoryview) -> bytes:
    """Return the BLAKE3 of a page, 32 bytes: as strong as SHA-256, and 5 times as fast here."""
    return blake3(data).digest()
