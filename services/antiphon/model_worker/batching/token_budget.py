"""The token budget of a plan: which prefill chunks fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from antiphon.model_worker.batching.admission import EngineLimits
    from antiphon.model_worker.batching.state_checkpoints import StateCheckpoints


class TokenBudget:
    """The remaining tokens of one plan. Prefill chunks are requested in scheduling order."""

    def __init__(
        self, limits: EngineLimits, page_tokens: int, checkpoints: StateCheckpoints | None = None
    ) -> None:
        self._limits = limits
        self._page_tokens = page_tokens
        self._checkpoints = checkpoints
        self._prefills = 0
        self._prefill_tokens = 0
        self.tokens = limits.step_tokens_max

    @property
    def full(self) -> bool:
        """Whether no further prefill joins the plan."""
        limits = self._limits
        return (
            self.tokens <= 0
            or (limits.prefill_max is not None and self._prefills >= limits.prefill_max)
            or (limits.fill_tokens is not None and self._prefill_tokens >= limits.fill_tokens)
        )

    def prefill_chunk(self, start: int, pending: int) -> int:
        """Length of the prefill chunk at `start`, of `pending` tokens left; 0: none fits.

        A chunk ends at a page border where it can, so that the page can be shared at once, and at
        checkpoints of recurrent states.
        """
        if self.full:
            return 0
        available = self._available()
        if self._limits.chunk_tokens is None:
            return pending if pending <= available or not self._prefills else 0
        length = min(pending, self._limits.chunk_tokens, available)
        if self._checkpoints is not None:
            length = min(length, self._checkpoints.stop(start, start + pending) - start)
        if length < pending:
            to_border = length - (start + length) % self._page_tokens
            # The first prefill advances even if a page does not fit in a plan.
            return to_border if to_border > 0 or self._prefills else length
        return length

    def spend_prefill(self, tokens: int) -> None:
        """Subtract a prefill chunk that is in the plan."""
        self.tokens -= tokens
        self._prefills += 1
        self._prefill_tokens += tokens

    def _available(self) -> int:
        """Tokens left for a prefill chunk. The first may be longer than `fill_tokens`."""
        if self._prefills == 0 or self._limits.fill_tokens is None:
            return self.tokens
        return min(self.tokens, self._limits.fill_tokens - self._prefill_tokens)
