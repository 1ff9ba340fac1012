"""Conversations that are too long for `truncation: auto`."""

from __future__ import annotations

import pytest

from antiphon.gateway.http.openai.responses.conversation import truncate_items
from antiphon.gateway.http.openai.responses.items import CallItem, CallOutputItem, MessageItem
from antiphon.wire.errors import PromptTooLong

BY_TOKENS = PromptTooLong.of(prompt_tokens=2000, tokens_max=1000)
BY_CHARACTERS = PromptTooLong.of_characters(
    characters=8000, context_tokens=1000, token_characters=4
)
HI = MessageItem(role="user", content="hi")
CALL = CallItem(call_id="c", name="read", arguments="x" * 5000)
OUTPUT = CallOutputItem(call_id="c", output="y")


@pytest.mark.parametrize("error", [BY_TOKENS, BY_CHARACTERS], ids=["tokens", "characters"])
def test_shortening_leaves_out_the_oldest_items(error: PromptTooLong) -> None:
    items = [MessageItem(role="user", content=f"{n}" * 400) for n in range(8)]
    left = truncate_items(items, error)
    assert left is not None
    assert left == items[-len(left) :]
    assert 1 <= len(left) <= 4


def test_shortening_keeps_the_call_of_the_last_output() -> None:
    assert truncate_items([HI, CALL, OUTPUT], BY_TOKENS) == [CALL, OUTPUT]
    assert truncate_items([CALL, OUTPUT], BY_TOKENS) is None


def test_shortening_takes_an_output_with_its_call() -> None:
    assert truncate_items([CALL, OUTPUT, HI], BY_TOKENS) == [HI]
