"""How many tokens of which prompts one plan takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from antiphon.model_worker.batching.admission import EngineLimits
    from antiphon.model_worker.batching.state_checkpoints import StateCheckpoints


class TokenBudget:
    """What is left of one plan. Prompts come in the order in which they are to be answered."""

    def __init__(
        self, limits: EngineLimits, page_tokens: int, checkpoints: StateCheckpoints | None = None
    ) -> None:
        self._limits = limits
        self._page_tokens = page_tokens
        self._checkpoints = checkpoints
        self._prompts = 0
        self._prompt_tokens = 0
        self.tokens = limits.step_tokens_max

    @property
    def full(self) -> bool:
        """Whether no further prompt joins the plan."""
        limits = self._limits
        return (
            self.tokens <= 0
            or (limits.prefill_max is not None and self._prompts >= limits.prefill_max)
            or (limits.fill_tokens is not None and self._prompt_tokens >= limits.fill_tokens)
        )

    def prefill_chunk(self, start: int, pending: int) -> int:
        """How many of a prompt's `pending` tokens, from `start` on, the plan takes; 0: none.

        A piece ends at the end of a page where it can, so that the page can be shared at once, and
        where a state is to be kept.
        """
        if self.full:
            return 0
        room = self._room()
        if self._limits.chunk_tokens is None:
            return pending if pending <= room or not self._prompts else 0
        length = min(pending, self._limits.chunk_tokens, room)
        if self._checkpoints is not None:
            length = min(length, self._checkpoints.stop(start, start + pending) - start)
        if length < pending:
            to_border = length - (start + length) % self._page_tokens
            # The first prompt goes on even if a page does not fit in a plan.
            return to_border if to_border > 0 or self._prompts else length
        return length

    def spend_prefill(self, tokens: int) -> None:
        """A piece of a prompt is in the plan."""
        self.tokens -= tokens
        self._prompts += 1
        self._prompt_tokens += tokens

    def _room(self) -> int:
        """Tokens that a prompt may have. The first one may be longer than what fills a plan."""
        if self._prompts == 0 or self._limits.fill_tokens is None:
            return self.tokens
        return min(self.tokens, self._limits.fill_tokens - self._prompt_tokens)
