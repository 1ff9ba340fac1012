"""Names of prompt blocks: a hash chain, so that equal digests mean equal prefixes.

A block's digest is SHA-256 of the digest before it and its tokens as little-endian uint32; the
first block's predecessor is the namespace, which stands for everything else that KV depends on.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Final

from msgspec import Meta

BLOCK_TOKENS: Final = 64
"""Tokens of one hashed block, whatever a page holds: 32 bytes a page would fill a message."""
DIGEST_BYTES: Final = 32
TOKEN_BYTES: Final = 4


CacheSaltText = Annotated[str, Meta(max_length=256)]
"""What a client says of whom it shares cached prefixes with; empty: with everybody who says none.
"""
CacheSalt = Annotated[bytes, Meta(max_length=DIGEST_BYTES)]
"""The same on the bus, by `cache_salt`: its digest, so that nobody reads there what was said."""


def namespace(model_digest: str, salt: str) -> bytes:
    """Name the world in which two equal prefixes have equal KV."""
    return _named(b"antiphon.kv.v1", model_digest.encode(), salt.encode())


def cache_salt(salt: str | None, extra_key: str | None = None) -> bytes:
    """Name those who find each other's prefixes, by what a request says of it; empty if nothing.

    Two texts, since SGLang has two: both must be the same.
    """
    if not salt and not extra_key:
        return b""
    return _named(b"antiphon.salt.v1", (salt or "").encode(), (extra_key or "").encode())


def tenant_salt(tenant: str, salt: bytes) -> bytes:
    """Keep a tenant's prefixes from all others, whatever salt its requests bring beside."""
    return _named(b"antiphon.tenant.v1", tenant.encode(), salt)


def salted(root: bytes, salt: bytes) -> bytes:
    """A world within another one, for those who brought the same salt; without one, that one."""
    return _named(b"antiphon.salted.v1", root, salt) if salt else root


def block_digests(root: bytes, token_ids: bytes) -> bytes:
    """Chain the full blocks of a prompt.

    Args:
        root: The namespace's digest.
        token_ids: As packed on the wire; ids are never negative, so int32 and uint32 are one.

    Returns:
        32 bytes a full block; a part of a block at the end has none.
    """
    step = BLOCK_TOKENS * TOKEN_BYTES
    digest, chain = root, bytearray()
    for start in range(0, len(token_ids) - step + 1, step):
        digest = hashlib.sha256(digest + token_ids[start : start + step]).digest()
        chain += digest
    return bytes(chain)


def _named(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(len(p).to_bytes(4, "little") + p for p in parts)).digest()
