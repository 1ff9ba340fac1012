"""Keys of prefixes: what must be equal for two pages to be equal, tokens and all else."""

from __future__ import annotations

import msgspec


class CacheKey(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """All that determines the content of a page: the tokens up to it, and what computed them.

    Attributes:
        namespace: From `wire.namespaces.cache_namespace`; prefixes are never shared across
            namespaces.
        token_ids: int32, little-endian.
    """

    namespace: bytes
    token_ids: bytes
