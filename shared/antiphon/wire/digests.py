"""Digests of prompt blocks: a hash chain, so that equal digests mean equal prefixes.

A block's digest is the SHA-256 of the previous digest and the block's tokens as little-endian
uint32. The first block's predecessor is the namespace, which covers everything else that the KV
cache depends on.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Annotated, Final

from msgspec import Meta

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK_TOKENS: Final = 64
"""Tokens of one hashed block, whatever the page size: 32 bytes a page would fill a message."""
DIGEST_BYTES: Final = 32
TOKEN_BYTES: Final = 4


CacheSaltText = Annotated[str, Meta(max_length=256)]
"""A client's cache salt: requests share cached prefixes only with requests of the same salt."""
CacheSalt = Annotated[bytes, Meta(max_length=DIGEST_BYTES)]
"""The salt's digest (`cache_salt`): the text itself does not appear on the bus."""


def namespace(model_digest: str, salt: str) -> bytes:
    """Return the root of the chain: within one namespace equal prefixes have equal KV."""
    return _named(b"antiphon.kv.v1", model_digest.encode(), salt.encode())


def cache_salt(salt: str | None, extra_key: str | None = None) -> bytes:
    """Return the digest of a request's cache salt; empty if it has none.

    SGLang has two such fields; requests share prefixes if both are equal.
    """
    if not salt and not extra_key:
        return b""
    return _named(b"antiphon.salt.v1", (salt or "").encode(), (extra_key or "").encode())


def tenant_salt(tenant: str, salt: bytes) -> bytes:
    """Isolate a tenant's prefixes from all others, whatever the salts of its requests."""
    return _named(b"antiphon.tenant.v1", tenant.encode(), salt)


def salted(root: bytes, salt: bytes) -> bytes:
    """Return the namespace of a salt within `root`; without a salt, `root` itself."""
    return _named(b"antiphon.salted.v1", root, salt) if salt else root


def block_digests(root: bytes, token_ids: bytes) -> bytes:
    """Hash the full blocks of a prompt to 32 bytes each; a partial last block is not hashed.

    `root` is the namespace's digest. Packed ids are never negative, so int32 and uint32 are equal.
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


def _named(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(len(p).to_bytes(4, "little") + p for p in parts)).digest()
