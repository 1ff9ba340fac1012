"""Cache groups: layers that cache the same for each token, and therefore share page tables."""

from __future__ import annotations

import math
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

Tokens = TypeVar("Tokens", int, "NDArray[np.int64]")

HOLE = -1
"""A table entry without a page: nothing reads it any more, or there never was one."""
UNKNOWN_STATE = -2
"""Stands for the state that a row starts from, where only the runner knows which that is."""
STATES_RUNNING = 2
"""States of a running request: the one that its next row reads, and the one that it writes."""


class GroupKind(StrEnum):
    """What the layers of a group cache, and for how long."""

    FULL = "full"
    """Keys and values of every token."""
    WINDOW = "window"
    """Keys and values of the last `window` tokens."""
    LATENT = "latent"
    """One compressed vector of every token."""
    STATE = "state"
    """A recurrent state, of fixed size: a page is one whole state."""
    CROSS = "cross"
    """Keys and values of another sequence: a slot has pages of its own, which nothing shares."""
    PASS = "pass"  # noqa: S105 (no password)
    """Nothing: a whole text is computed at once. Its pages have no bytes, and only count tokens."""
    DRAFT = "draft"
    """Keys and values of every token in all layers of the draft model; the last of the groups."""


ITEM_BYTES: Final[Mapping[str, int]] = {
    "float32": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
}
"""By the names that torch gives dtypes."""


class CacheTensor(msgspec.Struct, frozen=True, kw_only=True):
    """What a layer of a group caches under one name: a tensor in each entry of its pages.

    Attributes:
        name: Of the group's other tensors, each has another one.
        dtype: One of `ITEM_BYTES`.
        shape: Of one entry, this rank's shard.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def entry_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class CacheGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One pool of pages and how many of them a request needs.

    Attributes:
        layers: By index in their model: the draft model's for its group.
        tensors: What each layer caches; memory, codec and store know nothing else of the content.
        entry_tokens: Consecutive tokens that share an entry.
        page_tokens: Tokens of a page; equal in all groups. States are cached at the end of a page.
        window: Tokens that a query attends to, itself included; only for a window group.
    """

    kind: GroupKind
    layers: tuple[int, ...]
    tensors: tuple[CacheTensor, ...]
    entry_tokens: int = 1
    page_tokens: int
    pages_total: int
    window: int | None = None

    def __post_init__(self) -> None:
        if (self.kind is GroupKind.WINDOW) != (self.window is not None):
            raise ValueError("a window group, and only a window group, has a window")
        if self.kind is not GroupKind.STATE and self.page_tokens % self.entry_tokens:
            raise ValueError("an entry is shared by the tokens of one page")

    @property
    def page_entries(self) -> int:
        """Entries that a page has room for: an even number, since two may share a 32-bit word."""
        if self.kind is GroupKind.STATE:
            return 1
        entries = self.page_tokens // self.entry_tokens
        return entries + entries % 2

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, all layers together, this rank's shard."""
        entry_bytes = sum(tensor.entry_bytes for tensor in self.tensors)
        return len(self.layers) * self.page_entries * entry_bytes

    def table_len(self, tokens: Tokens) -> Tokens:
        """Page-table entries of a request of `tokens` tokens, or its number of states."""
        if self.kind is GroupKind.STATE:
            return (tokens > 0) * STATES_RUNNING
        return -(-tokens // self.page_tokens)

    def shared_len(self, tokens: int) -> int:
        """Entries that a request shares if it starts with `tokens` cached tokens."""
        if self.kind is GroupKind.STATE:
            return min(tokens, 1)
        return self.table_len(tokens)

    def dead_len(self, tokens: int) -> int:
        """Leading table entries that nothing reads any more once `tokens` tokens are computed.

        Only the last state is ever read. In a window a query attends to `window` tokens, itself
        included; the pages of a query at the last page border are kept, not only those of one at
        `tokens`: a fork continues from that border.
        """
        if self.kind is GroupKind.STATE:
            return max(0, tokens // self.page_tokens - 1)
        if self.window is None:
            return 0
        border = tokens // self.page_tokens * self.page_tokens
        return max(0, border - self.window + 1) // self.page_tokens

    @property
    def tokens_max(self) -> int:
        """Maximum length of a request that has the pool for itself.

        A window group needs less than this while decoding, but a retracted request prefills all of
        its tokens again.
        """
        if self.kind is GroupKind.STATE:
            return sys.maxsize
        return self.pages_total * self.page_tokens
