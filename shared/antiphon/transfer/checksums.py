"""The checksum of stored pages: see docs/decisions/0049."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blake3 import blake3

from antiphon.transfer.memory import views_of

if TYPE_CHECKING:
    from antiphon.transfer.memory import BlobData


def page_checksum(data: BlobData) -> bytes:
    """Return the BLAKE3 of a page, 32 bytes: as strong as SHA-256, and 5 times as fast here."""
    checksum = blake3()
    for view in views_of(data):
        checksum.update(view)
    return checksum.digest()
