"""What a cached page depends on besides the tokens up to it: one answer for all services.

Pages are shared only within a namespace. It is made of three parts, and each new dependency belongs
to one of them:

* what every service knows, the first fields of `PageOrigin`: model and cluster;
* what only the worker that computed a page knows, the other fields of `PageOrigin`;
* what the request brings, its `cache_salt`: tenant and salts. The gateway digests it once, because
  it alone knows whether tenants share.

The prefix cache, the sharing of prefills in flight, block digests, KV cache events and the names of
stored pages use the namespace of `cache_namespace`, or the half of it that is known to them.
"""

from __future__ import annotations

import functools
import hashlib
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta

from antiphon.wire.digests import DIGEST_BYTES, TOKEN_BYTES, block_digests

if TYPE_CHECKING:
    from collections.abc import Iterable

_LOW_BITS = b"\xff\xff\xff\x3f"
_WORD_BIT = b"\x00\x00\x00\x40"

CacheSaltText = Annotated[str, Meta(max_length=256)]
"""A client's cache salt: requests share cached prefixes only with requests of the same salt."""
CacheSalt = Annotated[bytes, Meta(max_length=DIGEST_BYTES)]
"""What a request contributes to its namespace, as a digest: no text of it is on the bus."""


class PageOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """The model and the arithmetic that compute pages, and their layout.

    Settings that change no bit of a page do not belong here, since each field reduces what can be
    shared.

    Attributes:
        model_digest: Digest of the model files, as the cluster is configured; all services have it.
        cluster_salt: Salt of the cluster; all services have it, too.
        weights: Digest of the model files that the worker has read, where pages leave its process.
        tower: Digest of the model that embeds media, as encoders announce it.
        weight_version: Name of the weights, which may be updated while the worker runs.
        config_overrides: Overridden fields of config.json, those of rotary embeddings among them.
        dtype: Dtype of the KV cache.
        quantization: Quantization of the weights.
        arithmetic: What else the bits of a page depend on: another instruction set, or another
            version of the kernels, sums in another order.
        kv_scales: Digest of the scales of a quantized KV cache.
        layout: Layout of a page.
    """

    model_digest: str
    cluster_salt: str = ""
    weights: str = ""
    tower: str = ""
    weight_version: str = ""
    config_overrides: str = ""
    dtype: str = ""
    quantization: str = ""
    arithmetic: str = ""
    kv_scales: str = ""
    layout: str = ""


PUBLIC: Final = frozenset({"model_digest", "cluster_salt"})
"""The fields of `PageOrigin` that every service knows."""


def cache_namespace(origin: PageOrigin, cache_salt: bytes = b"") -> bytes:
    """Return the namespace of a request's pages, in 64 bytes.

    The first half is made of what every service knows, and roots the chain of block digests: see
    `announced_root`. The second half covers everything.
    """
    public, private = _halves(origin)
    if cache_salt:
        public, private = _salted(public, cache_salt), _salted(private, cache_salt)
    return public + private


def cache_salt(salt: str | None, extra_key: str | None = None) -> bytes:
    """Return the digest of a request's salts; empty if it has none.

    SGLang has two such fields; requests share prefixes if both are equal.
    """
    if not salt and not extra_key:
        return b""
    return _named(b"antiphon.salt.v1", (salt or "").encode(), (extra_key or "").encode())


def tenant_salt(tenant: str, salt: bytes) -> bytes:
    """Isolate a tenant's prefixes from all others, whatever the salts of its requests."""
    return _named(b"antiphon.tenant.v1", tenant.encode(), salt)


def source_salt(salt: bytes, key: bytes) -> bytes:
    """Isolate prefixes by what all of their tokens attend to, beside those before them.

    `key` is that of a medium which is not in the prompt. It is a part of the salt, and not of the
    token ids: no token stands for it.
    """
    return _named(b"antiphon.source.v1", salt, key)


def announced_root(namespace: bytes) -> bytes:
    """Return the half of a namespace that roots its block digests, for other services to compare.

    A worker announces these digests, so a scheduler can compare them with those of a prompt. What
    only the worker knows may differ between two of them, and is not compared there.
    """
    return namespace[:DIGEST_BYTES]


def prompt_digests(origin: PageOrigin, cache_salt: bytes, token_ids: bytes) -> bytes:
    """Return the block digests of a prompt: 32 bytes for each full block of 64 tokens."""
    return block_digests(announced_root(cache_namespace(origin, cache_salt)), token_ids)


def medium_key(content: bytes, processing: bytes) -> bytes:
    """Return the key of a medium, in 32 bytes.

    `content` is the SHA-256 of its bytes, `processing` a digest of how they become embeddings. The
    tower's weights are those of the model, or of `PageOrigin.tower`.
    """
    return _named(b"antiphon.medium.v1", content, processing)


def key_ids(token_ids: bytes, spans: Iterable[tuple[int, int, bytes]]) -> bytes:
    """Return a prompt's ids with words made of media in place of their placeholders.

    The words of a medium are an expansion of its whole key in counter mode. Their highest bit of 31
    is set, so that none is a token id.

    Args:
        token_ids: int32, little-endian.
        spans: Of each medium the first placeholder, their number, and the key.
    """
    words = bytearray(token_ids)
    for start, tokens, key in spans:
        blocks = range(-(-tokens * TOKEN_BYTES // DIGEST_BYTES))
        stream = b"".join(
            hashlib.sha256(key + block.to_bytes(4, "little")).digest() for block in blocks
        )
        size = tokens * TOKEN_BYTES
        numbers = int.from_bytes(stream[:size], "little")
        lowest = int.from_bytes(_LOW_BITS * tokens, "little")
        highest = int.from_bytes(_WORD_BIT * tokens, "little")
        made = (numbers & lowest | highest).to_bytes(size, "little")
        words[start * TOKEN_BYTES : start * TOKEN_BYTES + size] = made
    return bytes(words)


def stored_name(namespace: bytes, block: bytes, shard: str) -> bytes:
    """Return the name under which a rank's shard of a block leaves its worker.

    `block` is its digest in the chain. `shard` says which part of every page this rank has: within
    a worker all ranks share one namespace, since they take and give away the same pages.
    """
    return _named(b"antiphon.page.v1", _sharded(namespace[DIGEST_BYTES:], shard), block)


@functools.lru_cache(maxsize=64)
def _halves(origin: PageOrigin) -> tuple[bytes, bytes]:
    public = _named(b"antiphon.kv.v1", origin.model_digest.encode(), origin.cluster_salt.encode())
    return public, hashlib.sha256(msgspec.msgpack.encode(origin)).digest()


def _salted(half: bytes, salt: bytes) -> bytes:
    return _named(b"antiphon.salted.v1", half, salt)


def _sharded(half: bytes, shard: str) -> bytes:
    return _named(b"antiphon.sharded.v1", half, shard.encode())


def _named(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(len(p).to_bytes(4, "little") + p for p in parts)).digest()
