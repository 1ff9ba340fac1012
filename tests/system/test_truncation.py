"""Prompts longer than the context, through real services that may truncate them."""

from __future__ import annotations

import pytest
from tests.system.stack import Stack, module_stack

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

CONTEXT_TOKENS = 128
KEPT = 122
WORDS = [f"word{number}" for number in range(5000)]


stack = module_stack("--allow-auto-truncate", "--context-length", str(CONTEXT_TOKENS))


@pytest.mark.parametrize("words", [200, 5000], ids=("light", "heavy"))
def test_long_prompt_is_answered_from_its_beginning(stack: Stack, words: int) -> None:
    text = " ".join(WORDS[:words])
    few = " ".join(WORDS[:30])
    tokens = stack.post("/v1/tokenize", {"prompt": few})["tokens"]
    sampling = {"temperature": 0, "max_new_tokens": 50, "ignore_eos": True}
    body = {"sampling_params": sampling, "return_prompt_token_ids": True}
    reply = stack.post("/generate", body | {"text": text})
    ids, meta = reply["prompt_token_ids"], reply["meta_info"]
    assert len(ids) == meta["prompt_tokens"] == KEPT
    assert ids[: len(tokens) - 1] == tokens[:-1]
    assert meta["completion_tokens"] == CONTEXT_TOKENS - KEPT
    same = stack.post("/generate", body | {"input_ids": ids})
    assert same["text"] == reply["text"]


def test_truncation_is_logged_by_the_gateway(stack: Stack) -> None:
    stack.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi " * 999}]})
    lines = [line for line in stack.log("gateway-0").splitlines() if "prompt truncated" in line]
    assert lines
    assert str(KEPT) in lines[-1]
