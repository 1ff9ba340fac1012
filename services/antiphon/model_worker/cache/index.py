"""Where finished prefixes are found again: the interface, and an index that keeps nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.model_worker.cache.table import PageTable


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheKey:
    """What determines the content of a page: the tokens up to it, and what computed them.

    Attributes:
        namespace: Digest of weights, dtype, adapter and salt; prefixes never cross it.
        token_ids: int32, little-endian.
    """

    namespace: str
    token_ids: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The longest prefix that every group holds, and a table that shares its pages."""

    length: int
    table: PageTable | None


class PrefixIndex(Protocol):
    """Finds the pages of a prefix that some request computed before.

    It holds pages by references of its own, so that a page is free when neither a request nor the
    index holds it. Called from the batching loop only.
    """

    def match(self, key: CacheKey) -> Match:
        """Find the longest known prefix that leaves at least one token to compute."""
        ...

    def insert(self, key: CacheKey, table: PageTable) -> None:
        """Remember the whole committed pages of a table whose request has ended."""
        ...

    def evict(self, pages: Sequence[int]) -> int:
        """Give up at least so many pages a group, the least useful first; return how many."""
        ...

    def clear(self) -> int:
        """Give up every page that no request holds; return how many."""
        ...


class NoIndex:
    """Remembers nothing, so every prefix is computed: always right, and the simplest."""

    def match(self, key: CacheKey) -> Match:
        """Find nothing."""
        return Match(length=0, table=None)

    def insert(self, key: CacheKey, table: PageTable) -> None:
        """Keep nothing."""

    def evict(self, pages: Sequence[int]) -> int:
        """Give up nothing, for it holds nothing."""
        return 0

    def clear(self) -> int:
        """Give up nothing, for it holds nothing."""
        return 0
