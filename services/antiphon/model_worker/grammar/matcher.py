"""A sequence and its grammar, as the batching loop sees them.

Nothing here depends on how grammars are compiled. A state is determined by the grammar and the
token ids of the output: migrating a request sends only these, and the next worker replays them.

Axes: V vocabulary, W = ceil(V / 32) words; token i is bit i % 32 of word i // 32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from antiphon.model_worker.batching.state import Finish
from antiphon.model_worker.batching.token_masks import pack, words_count
from antiphon.wire.base import FinishReason
from antiphon.wire.errors import EngineError, Internal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.model_worker.batching.plan import Ints


class GrammarState(Protocol):
    """The position of one sequence in its grammar. Belongs to one thread at a time."""

    @property
    def terminated(self) -> bool:
        """Whether an EOS token was accepted: no token may follow."""
        ...

    def accept(self, token: int) -> bool:
        """Advance by one token. False if the grammar rejects it; the state is then unchanged."""
        ...

    def fill(self, words: Ints) -> bool:
        """Write the mask of allowed next tokens into `words`, (W,); False if all are allowed.

        An `EngineError` if none is.
        """
        ...

    def rollback(self, tokens: int) -> None:
        """Undo the last `tokens` accepted tokens."""


class GrammarMatcher:
    """Advances one sequence through its grammar and holds the masks of its next tokens.

    A mask is computed as soon as the token before it is known, not as part of a step: planning
    either finds it ready or leaves the sequence out; a sequence that cannot continue has finished
    by then. Belongs to one thread at a time.

    Attributes:
        masks: (W,) allowed next tokens, None if all are: after the sequence, and after each draft.
        slow: It has delayed a step.
    """

    def __init__(self, state: GrammarState, vocab_size: int, end_ids: frozenset[int]) -> None:
        self.masks: list[Ints | None] = []
        self.end_ids = end_ids
        self.slow = False
        self._state = state
        self._words = words_count(vocab_size)
        self._marked: Ints | None = None
        self._since_mark = 0
        self._others = pack(~np.isin(np.arange(vocab_size), list(end_ids)))
        self.masks = [self._next_mask()]

    def must_end(self, draft: int = 0) -> bool:
        """Whether only an EOS token is allowed after so many drafts."""
        mask = self.masks[draft]
        return mask is not None and not (mask & self._others).any()

    def propose(self, drafts: Sequence[int]) -> int:
        """Compute the masks along drafts; return how many of these the grammar allows.

        A draft that would end the sequence counts as forbidden: nothing can be verified after it.
        """
        del self.masks[1:]
        accepted = 0
        try:
            for token in drafts:
                if not self._state.accept(token):
                    break
                accepted += 1
                if self._state.terminated:
                    break
                self.masks.append(self._next_mask())
        except EngineError:
            pass  # no token may follow this draft: the row ends before it
        self._state.rollback(accepted)
        return len(self.masks) - 1

    def accept_token(self, token: int) -> Finish | None:
        """Advance by the sampled token; return a finish if the token ends the sequence."""
        try:
            if not self._state.accept(token):
                # The mask forbade it: either the sampler is wrong or the mask was.
                return Finish.failed(Internal(f"token {token} was drawn against the grammar"))
            self._since_mark += 1
            if self._state.terminated:
                return Finish(reason=FinishReason.STOP, matched_stop=token)
            self.masks = [self._next_mask()]
        except EngineError as error:
            return Finish.failed(error)
        return None

    def checkpoint(self) -> None:
        self._marked, self._since_mark = self.masks[0], 0

    def rollback(self) -> None:
        self._state.rollback(self._since_mark)
        self.masks, self._since_mark = [self._marked], 0

    def _next_mask(self) -> Ints | None:
        # A new array: a plan that was built with the one before may still run.
        words = np.zeros(self._words, np.int32)
        return words if self._state.fill(words) else None


class DeferredGrammarState:
    """A grammar that applies only after certain tokens, such as the end of a model's reasoning.

    Before that every token is allowed. Only the complete sequence `after` activates the grammar.
    """

    def __init__(self, state: GrammarState, after: Sequence[int]) -> None:
        assert after, "a grammar that begins after nothing is not deferred"
        self._state = state
        self._after = tuple(after)
        self._seen: list[int] = []
        self._begun_at: int | None = None

    @property
    def terminated(self) -> bool:
        return self._state.terminated

    def accept(self, token: int) -> bool:
        if self._begun_at is not None and not self._state.accept(token):
            return False
        self._seen.append(token)
        if self._begun_at is None and tuple(self._seen[-len(self._after) :]) == self._after:
            self._begun_at = len(self._seen)
        return True

    def fill(self, words: Ints) -> bool:
        return self._begun_at is not None and self._state.fill(words)

    def rollback(self, tokens: int) -> None:
        length = len(self._seen) - tokens
        assert length >= 0, "more tokens were taken back than were accepted"
        if self._begun_at is not None:
            self._state.rollback(min(tokens, len(self._seen) - self._begun_at))
            if length < self._begun_at:
                self._begun_at = None
        del self._seen[length:]
