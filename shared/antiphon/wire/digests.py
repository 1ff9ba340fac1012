"""Digests of prompt blocks: a hash chain, so that equal digests mean equal prefixes.

A block's digest is the SHA-256 of the previous digest and the block's tokens as little-endian
uint32. The first block's predecessor covers everything else that the KV cache depends on: see
`wire.namespaces`.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK_TOKENS: Final = 64
"""Tokens of one hashed block, whatever the page size: 32 bytes a page would fill a message."""
DIGEST_BYTES: Final = 32
TOKEN_BYTES: Final = 4


def block_digests(root: bytes, token_ids: bytes) -> bytes:
    """Hash the full blocks of a prompt to 32 bytes each; a partial last block is not hashed.

    `root` stands before the first block. Packed ids are never negative, so int32 and uint32 are
    equal.
    """
    step = BLOCK_TOKENS * TOKEN_BYTES
    digest, chain = root, bytearray()
    for start in range(0, len(token_ids) - step + 1, step):
        digest = hashlib.sha256(digest + token_ids[start : start + step]).digest()
        chain += digest
    return bytes(chain)


def split_digests(digests: bytes) -> Iterator[bytes]:
    """Split concatenated digests; an incomplete one at the end is ignored."""
    whole = len(digests) - len(digests) % DIGEST_BYTES
    return (digests[at : at + DIGEST_BYTES] for at in range(0, whole, DIGEST_BYTES))
