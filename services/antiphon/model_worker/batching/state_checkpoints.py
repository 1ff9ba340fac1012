"""Where a request's state is kept for others: prompts are cut there."""

from __future__ import annotations

import msgspec

WORTH_TOKENS = 32
"""What a checkpoint must save to be worth a piece of a prompt of its own."""


class StateCheckpoints(msgspec.Struct, frozen=True, kw_only=True):
    """At multiples of `every` tokens, and at the last page border of a prompt.

    A state stands at one place only, unlike pages: a prefix is found at the place of a state that
    was kept and nowhere between two of them. Every one costs a state's memory, and a piece of a
    prompt that ends there.

    Attributes:
        every: Tokens from one to the next; whole pages.
        page_tokens: Tokens of a page.
    """

    every: int
    page_tokens: int

    def due(self, tokens: int) -> bool:
        """Whether the state after so many tokens of an answer is kept."""
        return tokens % self.every == 0

    def stop(self, start: int, end: int) -> int:
        """Where a piece of a prompt ends at the latest.

        Args:
            start: Its first token.
            end: Of the prompt.
        """
        following = (start // self.every + 1) * self.every
        border = self._border(end)
        if following > border > start:
            following = border
        return min(following, end)

    def last(self, agreed: int, end: int) -> int:
        """The last checkpoint within the first `agreed` tokens of a prompt that ends at `end`."""
        border = self._border(end)
        return border if 0 < border <= agreed else agreed // self.every * self.every

    def _border(self, end: int) -> int:
        """The last page border of a prompt; 0 if that is no place for a checkpoint."""
        border = end // self.page_tokens * self.page_tokens
        return border if border % self.every >= WORTH_TOKENS else 0
