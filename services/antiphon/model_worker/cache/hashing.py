"""Keys of prefixes: what must be equal for two pages to be equal, tokens and all else."""

from __future__ import annotations

import hashlib

import msgspec

from antiphon.model_worker.cache.groups import Shard
from antiphon.wire.digests import DIGEST_BYTES, namespace, salted


class CacheKey(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """All that determines the content of a page: the tokens up to it, and what computed them.

    Attributes:
        namespace: Digest of weights, dtype, adapter and salts; prefixes are never shared across
            namespaces.
        token_ids: int32, little-endian.
    """

    namespace: bytes
    token_ids: bytes


class Namespace(msgspec.Struct, frozen=True, kw_only=True):
    """Everything but the tokens that keys and values depend on, and their layout in a page.

    Its digest is the root of a radix tree and of the hash chain of its blocks. Settings that change
    no bit of a page do not belong here, since each field reduces what can be shared.

    Attributes:
        model_digest: Digest of the weights as they were loaded from disk.
        salt: Salt of the cluster. A request may have another one: see `request_namespace`.
        weight_version: Name of the weights, which may be updated while the worker runs.
        dtype: Dtype of the KV cache.
        quantization: Quantization of the weights.
        arithmetic: What else the bits of a page depend on: another instruction set, or another
            version of the kernels, sums in another order.
        kv_scales: Digest of the scales of a quantized KV cache.
        rope: Override of the model's rotary settings.
        layout: Layout of a page.
        shard: Which part of a page this rank holds.
        adapter_digest: Digest of the adapter in use; empty without one.
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
        """The digest of this namespace in 64 bytes, for `CacheKey`.

        The first half is known to a gateway too, and equals the root of a request's block digests,
        so that a scheduler can compare them with the events of a worker. The second half is known
        only to the worker. It is the same for all requests of the worker until its weights change,
        and then the prefix cache is cleared.
        """
        public = namespace(self.model_digest, self.salt)
        if self.adapter_digest:
            public = namespace(self.adapter_digest, public.hex())
        return public + hashlib.sha256(msgspec.msgpack.encode(self)).digest()


def request_namespace(digest: bytes, salt: bytes) -> bytes:
    """The part of a namespace that requests of the same salt share; without a salt: all of it."""
    if not salt:
        return digest
    return salted(digest[:DIGEST_BYTES], salt) + salted(digest[DIGEST_BYTES:], salt)


def announced_root(digest: bytes) -> bytes:
    """The part from which announced blocks are chained."""
    return digest[:DIGEST_BYTES]
