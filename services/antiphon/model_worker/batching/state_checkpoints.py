"""Where recurrent states are cached: prefill chunks end there."""

from __future__ import annotations

import msgspec

WORTH_TOKENS = 32
"""Minimum number of tokens that a checkpoint must save to be worth a prefill chunk of its own."""


class StateCheckpoints(msgspec.Struct, frozen=True, kw_only=True):
    """Checkpoints at multiples of `every` tokens, and at the last page border of a prompt.

    A state belongs to one position only, unlike pages: a prefix matches at a checkpoint and nowhere
    between two of them. Each costs a state's memory, and a prefill chunk that ends there.

    Attributes:
        every: Tokens from one checkpoint to the next; whole pages.
        page_tokens: Tokens of a page.
    """

    every: int
    page_tokens: int

    def due(self, tokens: int) -> bool:
        """Whether the state after so many tokens is cached while decoding."""
        return tokens % self.every == 0

    def stop(self, start: int, end: int) -> int:
        """The latest end of a prefill chunk.

        Args:
            start: First token of the chunk.
            end: End of the prompt.
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
        """The last page border of a prompt; 0 if a checkpoint there is not worth it."""
        border = end // self.page_tokens * self.page_tokens
        return border if border % self.every >= WORTH_TOKENS else 0
