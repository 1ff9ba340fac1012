"""The tokenizer of the embedded model: every text comes back, and the template is one spelling."""

from __future__ import annotations

import json
from itertools import islice

import jinja2.sandbox
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from antiphon import embedded
from antiphon.model_worker.training.batches import Encoder
from antiphon.model_worker.training.dialogue import Message, seeded
from antiphon.model_worker.training.grammar import conversations

TOKENIZER = Tokenizer.from_file(str(embedded.path() / "tokenizer.json"))
THREE_TURNS = (
    Message("system", "You are a helpful assistant."),
    Message("user", "Hello, my name is Ada."),
    Message("assistant", "Nice to meet you, Ada!"),
    Message("user", "What is 12 + 30?"),
    Message("assistant", "12 + 30 = 42."),
    Message("user", "What is my name?"),
)


def render(messages: tuple[Message, ...], *, add_generation_prompt: bool) -> str:
    settings = json.loads((embedded.path() / "tokenizer_config.json").read_text())
    template = jinja2.sandbox.ImmutableSandboxedEnvironment().from_string(settings["chat_template"])
    chat = [{"role": message.role, "content": message.content} for message in messages]
    return template.render(
        messages=chat,
        bos_token=settings["bos_token"],
        add_generation_prompt=add_generation_prompt,
    )


@given(st.text())
def test_any_text_survives_the_tokenizer(text: str) -> None:
    token_ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(token_ids, skip_special_tokens=False) == text


@given(st.integers(min_value=0, max_value=10**12))
def test_each_digit_is_a_token(number: int) -> None:
    tokens = TOKENIZER.encode(f"Count to {number}, then stop.").tokens
    assert [token for token in tokens if token.isdigit()] == list(str(number))


def test_the_template_writes_a_conversation_of_three_turns() -> None:
    assert render(THREE_TURNS, add_generation_prompt=True) == (
        "<|bos|><|system|>You are a helpful assistant.<|end|>"
        "<|user|>Hello, my name is Ada.<|end|>"
        "<|assistant|>Nice to meet you, Ada!<|end|>"
        "<|user|>What is 12 + 30?<|end|>"
        "<|assistant|>12 + 30 = 42.<|end|>"
        "<|user|>What is my name?<|end|>"
        "<|assistant|>"
    )


def test_training_writes_chats_as_the_template_does() -> None:
    encoder = Encoder(TOKENIZER)
    for messages in islice(conversations(11), 100):
        row = encoder.chat(seeded("rows", 0), messages)
        text = render(messages, add_generation_prompt=False)
        assert row.token_ids == TOKENIZER.encode(text).ids[: len(row.token_ids)]


def test_only_what_the_assistant_says_is_supervised() -> None:
    row = Encoder(TOKENIZER).chat(seeded("rows", 1), THREE_TURNS)
    said = [token for token, wanted in zip(row.token_ids, row.supervised, strict=True) if wanted]
    assert TOKENIZER.decode(said, skip_special_tokens=False) == (
        "Nice to meet you, Ada!<|end|>12 + 30 = 42.<|end|>"
    )


def test_a_role_that_the_model_does_not_know_is_refused() -> None:
    def refuse(reason: str) -> None:
        raise ValueError(reason)

    settings = json.loads((embedded.path() / "tokenizer_config.json").read_text())
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment()
    template = environment.from_string(settings["chat_template"])
    with pytest.raises(ValueError, match="not tool"):
        template.render(
            messages=[{"role": "tool", "content": "1"}], bos_token="", raise_exception=refuse
        )
