"""Cache groups: layers that cache the same for each token, and therefore share page tables."""

from __future__ import annotations

import sys
from enum import StrEnum

import msgspec

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
    PASS = "pass"  # noqa: S105 (no password)
    """Nothing: a whole text is computed at once. Its pages have no bytes, and only count tokens."""
    DRAFT = "draft"
    """Keys and values of every token in all layers of the draft model; the last of the groups."""


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    rank: int = 0
    ranks: int = 1


class CacheGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One pool of pages and how many of them a request needs.

    Attributes:
        layers: By index in their model: the draft model's for its group.
        page_bytes: Bytes of a page, all layers together, this rank's shard.
        page_tokens: Tokens of a page; equal in all groups. States are cached at the end of a page.
        window: Tokens that a query attends to, itself included; only for a window group.
    """

    kind: GroupKind
    layers: tuple[int, ...]
    page_bytes: int
    page_tokens: int
    pages_total: int
    window: int | None = None
    shard: Shard = Shard()

    def __post_init__(self) -> None:
        if (self.kind is GroupKind.WINDOW) != (self.window is not None):
            raise ValueError("a window group, and only a window group, has a window")

    def table_len(self, tokens: int) -> int:
        """Page-table entries of a request of `tokens` tokens, or its number of states."""
        if self.kind is GroupKind.STATE:
            return STATES_RUNNING if tokens else 0
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
