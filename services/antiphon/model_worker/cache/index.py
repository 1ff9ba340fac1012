"""The interface of the prefix cache, and an empty one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.model_worker.cache.events import CacheEvent
    from antiphon.model_worker.cache.table import PageTable


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheKey:
    """All that determines the content of a page: the tokens up to it, and what computed them.

    Attributes:
        namespace: Digest of weights, dtype, adapter and salts (`cache.hashing`); prefixes are never
            shared across namespaces.
        token_ids: int32, little-endian.
    """

    namespace: bytes
    token_ids: bytes


class PrefixNode(Protocol):
    """A node of the radix tree, for policies that order requests by it. Hashed by identity."""

    @property
    def parent(self) -> PrefixNode | None: ...


@dataclass(frozen=True, slots=True)
class Prefix:
    """The cached prefix of a key. No page is referenced and none was touched.

    Attributes:
        length: Tokens, in whole pages, that every group holds; the same as of a `match`.
        node: The node that holds the last of them; None if there are none.
    """

    length: int
    node: PrefixNode | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMatch:
    """The longest prefix that every group holds, and a table that shares its pages."""

    length: int
    table: PageTable | None


class PrefixIndex(Protocol):
    """Finds the pages of a prefix that some request computed before.

    It holds references of its own, so that a page is free when neither a request nor the prefix
    cache holds it. Called from the batching loop only.

    A waiting request is looked up by `peek`, which changes nothing. `touch` protects its prefix
    from eviction until it can start. `match` takes references for an attempt to start it, and
    `use` counts a hit once it has started. `insert` adds computed pages.
    """

    @property
    def generation(self) -> int:
        """Grows whenever the result of a `peek` may change: with insert, evict and clear.

        While it is unchanged, the lengths of earlier peeks are exact. Their nodes may have been
        split: they are still on the path of the key.
        """
        ...

    def peek(self, key: CacheKey) -> Prefix:
        """The prefix that `match` would return; takes no reference and marks nothing as used."""
        ...

    def touch(self, key: CacheKey) -> None:
        """Mark the cached prefix of a key as recently used, because it will be needed soon."""
        ...

    def match(self, key: CacheKey) -> PrefixMatch:
        """Find the longest cached prefix that leaves at least one token to compute.

        This marks nothing as used: the first waiting request is matched in each step, and its table
        may be released again. See `use`.
        """
        ...

    def use(self, key: CacheKey, tokens: int) -> None:
        """Count a hit: a request has started with `tokens` cached tokens, in whole pages."""
        ...

    def insert(self, key: CacheKey, table: PageTable) -> None:
        """Insert the full committed pages of a table, also of a request that still runs.

        Where a page for the same tokens is cached already, the table takes that one and releases
        its own: entries of the table change, and `PageTable.revision` grows.

        The inserted prefix ends with the key or with `committed`, whichever is shorter. Nothing is
        inserted of a table that was started before the last `clear`.
        """
        ...

    def take_events(self) -> tuple[CacheEvent, ...]:
        """Blocks stored and removed since the last call, if events are published."""
        ...

    @property
    def evicted_tokens(self) -> int:
        """Tokens evicted since start; for a model with only states, the tokens of their pages."""
        ...

    def evictable(self) -> list[int]:
        """Evictable pages by group. Costs nothing."""
        ...

    def evict(self, pages: Sequence[int]) -> int:
        """Evict at least so many pages by group, the least useful first; return how many.

        Fewer only if fewer are evictable. More in other groups: a page evicted from a full group
        takes along the pages of the same tokens in window groups.
        """
        ...

    def clear(self) -> int:
        """Remove everything; return how many pages no request held.

        Pages that requests still hold are never matched again, and free when they are released.
        """
        ...


class NoIndex:
    """An empty prefix cache: every request prefills its whole prompt."""

    def __init__(self, groups: int) -> None:
        self._groups = groups

    @property
    def generation(self) -> int:
        return 0

    def peek(self, key: CacheKey) -> Prefix:
        return Prefix(0, None)

    def touch(self, key: CacheKey) -> None: ...

    def match(self, key: CacheKey) -> PrefixMatch:
        return PrefixMatch(length=0, table=None)

    def use(self, key: CacheKey, tokens: int) -> None: ...

    def insert(self, key: CacheKey, table: PageTable) -> None: ...

    def take_events(self) -> tuple[CacheEvent, ...]:
        return ()

    @property
    def evicted_tokens(self) -> int:
        return 0

    def evictable(self) -> list[int]:
        return [0] * self._groups

    def evict(self, pages: Sequence[int]) -> int:
        return 0

    def clear(self) -> int:
        return 0
