"""Cache groups: layers that keep the same thing a token, and therefore share page tables."""

from __future__ import annotations

import sys
from enum import StrEnum

import msgspec


class GroupKind(StrEnum):
    """What the layers of a group keep, and for how long."""

    FULL = "full"
    """Keys and values of every token."""
    WINDOW = "window"
    """Keys and values of the last `window` tokens."""
    LATENT = "latent"
    """One compressed vector of every token."""
    STATE = "state"
    """One recurrent state a request, whatever its length: a page is a slot."""
    CROSS = "cross"
    """Keys and values of another sequence, as an image: written once, as long as that one."""
    DRAFT = "draft"
    """Keys and values of a draft model's layers, of every token."""


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """Which part of each page this rank holds."""

    rank: int = 0
    ranks: int = 1


class CacheGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One pool of pages and how many of them a request needs.

    Attributes:
        layers: The decoder layers whose cache lies in these pages.
        page_bytes: Of one page, all layers together, this rank's shard.
        page_tokens: Tokens of one page; equal in all groups but `state`.
        pages_total: Size of the pool.
        window: Tokens that a query sees, itself included; of a window group, and only there.
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
        if self.kind is GroupKind.CROSS:
            # Its length is the other sequence's, which no request carries yet.
            raise ValueError("this build has no model with cross attention")

    def table_len(self, tokens: int) -> int:
        """Entries that a request of `tokens` tokens has in its page table."""
        if self.kind is GroupKind.STATE:
            return min(tokens, 1)
        return -(-tokens // self.page_tokens)

    def dead_len(self, tokens: int) -> int:
        """Leading table entries that nothing reads any more once `tokens` tokens are computed.

        A query sees `window` tokens, itself included. We keep what a query at the last page border
        sees, not only the one at `tokens`: a fork goes on from that border.
        """
        if self.window is None:
            return 0
        border = tokens // self.page_tokens * self.page_tokens
        return max(0, border - self.window + 1) // self.page_tokens

    @property
    def tokens_max(self) -> int:
        """The longest request that the pool takes when nothing else is in it.

        A window group needs less than this once it decodes, but a retracted request comes back
        with all its tokens at once.
        """
        if self.kind is GroupKind.STATE:
            return sys.maxsize
        return self.pages_total * self.page_tokens
