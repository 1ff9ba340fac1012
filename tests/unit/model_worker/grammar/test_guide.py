"""A guide follows its choice, and a grammar may begin late."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.worker import error_of
from tests.unit.model_worker.grammar.words import END, VOCAB_SIZE, Word

from antiphon.model_worker.grammar.matcher import DeferredGrammarState, GrammarMatcher
from antiphon.wire.base import FinishReason
from antiphon.wire.errors import InvalidRequest

AFTER = (20, 20, 21)
CAB = [5, 3, 4]


class Barren(Word):
    """Has nothing to go on with after its letters."""

    def fill(self, words: np.ndarray) -> bool:
        if self.place == len(self.letters) - 1:
            raise InvalidRequest("grammar: no token may come next")
        return super().fill(words)


class Raises(Word):
    """Ends as a matcher does that cannot go on."""

    def accept(self, token: int) -> bool:
        raise InvalidRequest("grammar: out of memory")


def guide(state: Word | DeferredGrammarState) -> GrammarMatcher:
    return GrammarMatcher(state, VOCAB_SIZE, frozenset({END}))


def test_a_matcher_that_raises_ends_its_own_choice() -> None:
    finish = guide(Raises("cab")).accept_token(CAB[0])
    assert error_of(finish).code == "invalid_request"


def test_a_sentence_is_followed_to_its_end() -> None:
    word = guide(Word("cab"))
    for token in CAB:
        assert not word.must_end
        assert word.accept_token(token) is None
    assert word.must_end
    finish = word.accept_token(END)
    assert finish is not None
    assert (finish.reason, finish.matched_stop, finish.error) == (FinishReason.STOP, END, None)


def test_a_choice_that_cannot_go_on_ends_with_the_reason() -> None:
    barren = guide(Barren("ab"))
    assert barren.accept_token(3) is None
    finish = barren.accept_token(4)
    assert error_of(finish).message == "grammar: no token may come next"
    with pytest.raises(InvalidRequest):
        guide(Barren(""))


def test_everything_is_allowed_until_the_grammar_begins() -> None:
    thinker = guide(DeferredGrammarState(Word("cab"), AFTER))
    for token in (20, 21, 20, 20, 20, END, 7, 20, 20, 21):
        assert thinker.mask is None
        assert not thinker.must_end
        assert thinker.accept_token(token) is None
    assert thinker.mask is not None
    for token in CAB:
        assert thinker.accept_token(token) is None
    assert thinker.must_end
    assert thinker.accept_token(END) is not None


@given(st.lists(st.sampled_from([3, 4, 5, 20, 21, END, -1, -2, -4, -9]), max_size=60))
def test_what_is_taken_back_leaves_no_trace(moves: list[int]) -> None:
    """Moves are tokens, or below 0 how many to take back."""
    state, tokens = DeferredGrammarState(Word("cab"), AFTER), list[int]()
    for move in moves:
        if move < 0:
            state.rollback(min(-move, len(tokens)))
            del tokens[len(tokens) - min(-move, len(tokens)) :]
        elif state.accept(move):
            tokens.append(move)
        fresh = DeferredGrammarState(Word("cab"), AFTER)
        assert all(fresh.accept(token) for token in tokens)
        assert fresh.terminated == state.terminated
        if not fresh.terminated:
            words, others = np.zeros((2, 2), np.int32)
            assert fresh.fill(words) == state.fill(others)
            assert words.tolist() == others.tolist()
