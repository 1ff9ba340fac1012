"""A choice and the grammar that its answer must follow, as the batching loop sees them.

Nothing here depends on how grammars are compiled. A state is determined by the grammar and the
ids of the answer: whoever moves a choice sends only these, and the next worker replays them.

Axes: V vocabulary, W = ceil(V / 32) words; token i is bit i % 32 of word i // 32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from antiphon.model_worker.batching.request import Finish
from antiphon.model_worker.batching.token_masks import pack, words_count
from antiphon.wire.base import FinishReason
from antiphon.wire.errors import EngineError, Internal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.model_worker.batching.plan import Ints


class GrammarState(Protocol):
    """Where one choice stands in its grammar. Belongs to one thread at a time."""

    @property
    def terminated(self) -> bool:
        """Whether a token that ends the answer was accepted: nothing follows."""
        ...

    def accept(self, token: int) -> bool:
        """Go on by one token. False if the grammar does not allow it; nothing has changed then."""
        ...

    def fill(self, words: Ints) -> bool:
        """Write which tokens may come next into `words`, (W,); False if all may.

        Raises:
            EngineError: The choice cannot go on: no token may come.
        """
        ...

    def rollback(self, tokens: int) -> None:
        """Take back the last so many tokens, of those that were accepted."""
        ...


class GrammarMatcher:
    """Follows one choice through its grammar and has the mask of its next token ready.

    The mask is made as soon as its token is known, and so belongs to no step: whoever plans finds
    it done, or leaves the choice out; one that cannot go on has ended by then. Belongs to one
    thread at a time.

    Attributes:
        mask: (W,) which tokens may come next; None if all may.
        end_ids: The tokens that end a complete answer.
        slow: It has held up a step once.
    """

    def __init__(self, state: GrammarState, vocab_size: int, end_ids: frozenset[int]) -> None:
        """Begin with the first token.

        Args:
            state: Replayed up to here.
            vocab_size: Tokens that the model has logits for.
            end_ids: What the grammar takes for the end of an answer.

        Raises:
            EngineError: No token may come.
        """
        self.mask: Ints | None = None
        self.end_ids = end_ids
        self.slow = False
        self._state = state
        # Two, of which the one of the mark is left alone.
        self._words = np.zeros((2, words_count(vocab_size)), np.int32)
        self._turn = 0
        self._marked: Ints | None = None
        self._since_mark = 0
        self._others = pack(~np.isin(np.arange(vocab_size), list(end_ids)))
        self._refresh()

    @property
    def must_end(self) -> bool:
        """Whether only a token that ends the answer may come next."""
        return self.mask is not None and not (self.mask & self._others).any()

    def accept_token(self, token: int) -> Finish | None:
        """Go on by the token that was drawn; how the choice ends, if it ends by that."""
        try:
            if not self._state.accept(token):
                # The mask forbade it: whoever drew it is wrong, or the mask was.
                return Finish.failed(Internal(f"token {token} was drawn against the grammar"))
            self._since_mark += 1
            if self._state.terminated:
                return Finish(reason=FinishReason.STOP, matched_stop=token)
            self._refresh()
        except EngineError as error:
            return Finish.failed(error)
        return None

    def checkpoint(self) -> None:
        """Remember where it stands; see `take_back`."""
        self._marked, self._since_mark = self.mask, 0
        self._turn ^= 1

    def rollback(self) -> None:
        """Stand where it stood at the mark, whatever has come since."""
        self._state.rollback(self._since_mark)
        self.mask, self._since_mark = self._marked, 0
        self._turn ^= 1

    def _refresh(self) -> None:
        words = self._words[self._turn]
        self.mask = words if self._state.fill(words) else None


class DeferredGrammarState:
    """A grammar that begins after certain tokens have come, as after a model's thinking.

    Before that everything is allowed. Tokens that only begin like `after` do not begin it.
    """

    def __init__(self, state: GrammarState, after: Sequence[int]) -> None:
        assert after, "a grammar that begins after nothing is not deferred"
        self._state = state
        self._after = tuple(after)
        self._seen: list[int] = []
        self._begun_at: int | None = None

    @property
    def terminated(self) -> bool:
        """See `GrammarState`."""
        return self._state.terminated

    def accept(self, token: int) -> bool:
        """See `GrammarState`."""
        if self._begun_at is not None and not self._state.accept(token):
            return False
        self._seen.append(token)
        if self._begun_at is None and tuple(self._seen[-len(self._after) :]) == self._after:
            self._begun_at = len(self._seen)
        return True

    def fill(self, words: Ints) -> bool:
        """See `GrammarState`."""
        return self._begun_at is not None and self._state.fill(words)

    def rollback(self, tokens: int) -> None:
        """See `GrammarState`."""
        length = len(self._seen) - tokens
        assert length >= 0, "more tokens were taken back than were accepted"
        if self._begun_at is not None:
            self._state.rollback(min(tokens, len(self._seen) - self._begun_at))
            if length < self._begun_at:
                self._begun_at = None
        del self._seen[length:]
