"""Where prefixes are found again: the interface, and an index that keeps nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.model_worker.cache.events import CacheEvent
    from antiphon.model_worker.cache.table import PageTable


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheKey:
    """What determines the content of a page: the tokens up to it, and what computed them.

    Attributes:
        namespace: Digest of weights, dtype, adapter and salts (`cache.hashing`); prefixes never
            cross it.
        token_ids: int32, little-endian.
    """

    namespace: bytes
    token_ids: bytes


class PrefixNode(Protocol):
    """A place in the tree, for policies that order requests by it. Hashed by identity."""

    @property
    def parent(self) -> PrefixNode | None:
        """The node whose prefix is the next shorter one; None above a namespace's root."""
        ...


@dataclass(frozen=True, slots=True)
class Prefix:
    """What the index could give for a key. Nothing is held and nothing was touched.

    Attributes:
        length: Tokens, in whole pages, that every group could give; the same as of a `match`.
        node: The one that holds the last of them; None if there are none.
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

    It holds pages by references of its own, so that a page is free when neither a request nor the
    index holds it. Called from the batching loop only.
    """

    @property
    def generation(self) -> int:
        """Grows whenever a `peek` may say something else: with insert, evict and clear."""
        ...

    def peek(self, key: CacheKey) -> Prefix:
        """Say what `match` would give, and hold nothing."""
        ...

    def touch(self, key: CacheKey) -> None:
        """What is known of a key is about to be of use: others go before it."""
        ...

    def match(self, key: CacheKey) -> PrefixMatch:
        """Find the longest known prefix that leaves at least one token to compute.

        Whoever asks may have to give the table back, so it counts as no use: see `use`.
        """
        ...

    def use(self, key: CacheKey, tokens: int) -> None:
        """A request has started with the first `tokens` of its key's tokens, in whole pages."""
        ...

    def insert(self, key: CacheKey, table: PageTable) -> None:
        """Remember the whole committed pages of a table, also of a request that still runs.

        Where the index has a page for the same tokens already, the table takes that one and gives
        its own back: entries of the table change, and `PageTable.revision` grows.

        Args:
            key: Of the table's tokens, from the first. What is remembered ends with it or with
                `committed`, whichever is shorter.
            table: Of a request that has ended, or that still runs. Of one that was begun before
                the last `clear` nothing is remembered.
        """
        ...

    def take_events(self) -> tuple[CacheEvent, ...]:
        """Blocks that came and went since the last call, if anybody is told of them."""
        ...

    @property
    def evicted_tokens(self) -> int:
        """Tokens whose pages `evict` gave up since the start."""
        ...

    def evictable(self) -> list[int]:
        """Pages a group that `evict` could give up now. Costs nothing."""
        ...

    def evict(self, pages: Sequence[int]) -> int:
        """Give up at least so many pages a group, the least useful first; return how many."""
        ...

    def clear(self) -> int:
        """Forget everything; return how many pages nobody held.

        What requests still hold is never found again, and is free when they release it.
        """
        ...


class NoIndex:
    """Remembers nothing, so every prefix is computed: always right, and the simplest."""

    def __init__(self, groups: int) -> None:
        self._groups = groups

    @property
    def generation(self) -> int:
        """Nothing ever changes."""
        return 0

    def peek(self, key: CacheKey) -> Prefix:
        """Find nothing."""
        return Prefix(0, None)

    def touch(self, key: CacheKey) -> None:
        """Nothing is known of any."""

    def match(self, key: CacheKey) -> PrefixMatch:
        """Find nothing."""
        return PrefixMatch(length=0, table=None)

    def use(self, key: CacheKey, tokens: int) -> None:
        """Nothing is known of any."""

    def insert(self, key: CacheKey, table: PageTable) -> None:
        """Keep nothing."""

    def take_events(self) -> tuple[CacheEvent, ...]:
        """Nothing comes and nothing goes."""
        return ()

    @property
    def evicted_tokens(self) -> int:
        """None, for it holds nothing."""
        return 0

    def evictable(self) -> list[int]:
        """Nothing, for it holds nothing."""
        return [0] * self._groups

    def evict(self, pages: Sequence[int]) -> int:
        """Give up nothing, for it holds nothing."""
        return 0

    def clear(self) -> int:
        """Give up nothing, for it holds nothing."""
        return 0
