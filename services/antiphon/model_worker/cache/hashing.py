"""Names of prefixes: what must be equal, besides the tokens, for two pages to be equal."""

from __future__ import annotations

import hashlib

import msgspec

from antiphon.model_worker.cache.groups import Shard
from antiphon.wire.digests import DIGEST_BYTES, namespace, salted


class Namespace(msgspec.Struct, frozen=True, kw_only=True):
    """Everything but the tokens that keys and values depend on, and how they lie in a page.

    Its digest is the root of a tree of prefixes and of the hash chain of their blocks. Settings
    that change no bit of a page do not belong here, for each field divides what could be shared.

    Attributes:
        model_digest: Of the weights as they were loaded from disk.
        salt: The cluster's. A request may bring one of its own: see `of_request`.
        weight_version: Counts updates of the weights while the worker runs.
        dtype: Of keys and values.
        quantization: Of the weights.
        arithmetic: What the bits of a page depend on, beside these: another instruction set, or
            another version of the kernels, sums in another order.
        kv_scales: Digest of the scales of quantized keys and values.
        rope: What replaces the model's own rotary settings.
        layout: How a page is laid out.
        shard: Which part of a page this rank holds.
        adapter_digest: Of the adapter that was on; empty without one.
    """

    model_digest: str
    salt: str = ""
    weight_version: str = ""
    dtype: str = ""
    quantization: str = ""
    arithmetic: str = ""
    kv_scales: str = ""
    rope: str = ""
    layout: str = ""
    shard: Shard = Shard()
    adapter_digest: str = ""

    def digest(self) -> bytes:
        """Name this namespace in 64 bytes, for `CacheKey`.

        The first half is what a gateway can know of a request, and equals the root of its block
        digests, so that a scheduler can compare them with the events of a worker. The second half
        is what only the worker knows. It is the same for all that the worker computes until its
        weights change, and then the index is cleared.
        """
        public = namespace(self.model_digest, self.salt)
        if self.adapter_digest:
            public = namespace(self.adapter_digest, public.hex())
        return public + hashlib.sha256(msgspec.msgpack.encode(self)).digest()


def request_namespace(digest: bytes, salt: bytes) -> bytes:
    """Name the part of a namespace that a request shares with those who brought the same salt.

    Args:
        digest: Of the namespace.
        salt: As on the bus; empty for a request that brought none, whose the namespace is.
    """
    return salted(digest[:DIGEST_BYTES], salt) + salted(digest[DIGEST_BYTES:], salt)


def announced_root(digest: bytes) -> bytes:
    """The part of a namespace's digest from which announced blocks are chained."""
    return digest[:DIGEST_BYTES]


def page_name(digest: bytes, block: bytes) -> bytes:
    """Name the pages of a block beyond this worker, where layouts and versions meet.

    Args:
        digest: Of the namespace.
        block: The block's digest, chained from `announced_root`.
    """
    return hashlib.sha256(digest + block).digest()
