"""How long an answer may get, among workers that hold more and less."""

from __future__ import annotations

import pytest

from antiphon.gateway.ask import Ask
from antiphon.gateway.sampling import answer_tokens
from antiphon.wire.errors import InvalidRequest, PromptTooLong

CONTEXTS = {100, 400}


def ask(tokens_max: int | None = None, tokens_default: int | None = None) -> Ask:
    return Ask(door="test", model=None, tokens_max=tokens_max, tokens_default=tokens_default)


def test_what_the_client_says_is_bounded_by_the_largest_worker() -> None:
    assert answer_tokens(ask(390), prompt_tokens=10, contexts=CONTEXTS) == 390
    with pytest.raises(InvalidRequest, match="400 tokens"):
        answer_tokens(ask(391), prompt_tokens=10, contexts=CONTEXTS)


@pytest.mark.parametrize(
    ("prompt_tokens", "default", "expected"),
    [(10, None, 90), (99, None, 1), (100, None, 300), (10, 16, 16), (95, 16, 5), (399, 16, 1)],
)
def test_what_it_does_not_say_is_what_each_worker_holds_that_holds_the_prompt(
    prompt_tokens: int, default: int | None, expected: int
) -> None:
    asked = ask(tokens_default=default)
    assert answer_tokens(asked, prompt_tokens=prompt_tokens, contexts=CONTEXTS) == expected


def test_a_prompt_that_the_largest_worker_does_not_hold_is_too_long() -> None:
    with pytest.raises(PromptTooLong):
        answer_tokens(ask(), prompt_tokens=400, contexts=CONTEXTS)
    assert answer_tokens(ask(0), prompt_tokens=400, contexts=CONTEXTS) == 0
