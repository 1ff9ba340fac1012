"""The tokenizer of the embedded model, its template, and the rows and batches made of them."""

from __future__ import annotations

import json
from itertools import islice

import jinja2.sandbox
import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.training.batches import UNSUPERVISED, Encoder, Row, batches, collate
from tests.training.dialogue import Chat, Message, said, schema, seeded
from tests.training.generation import wire_message
from tests.training.grammar import conversations
from tests.training.tokenizer import (
    BOS,
    CHAT_TEMPLATE,
    CONTEXT_TOKENS,
    MARKS,
    SPECIAL,
    VOCABULARY_SIZE,
    special_id,
    train_tokenizer,
    with_marks,
)
from tokenizers import Tokenizer

from antiphon import embedded
from antiphon.tokenizer.template import ChatTemplate
from antiphon.wire.errors import InvalidRequest
from antiphon.wire.tokenize import ChatMessage, TemplateParams


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """A tokenizer as training makes it, from fewer conversations."""
    return train_tokenizer(seed=0, conversations_read=500)


TOKENIZER = Tokenizer.from_file(str(embedded.path() / "tokenizer.json"))
THREE_TURNS = (
    Message("system", "You are a helpful assistant."),
    Message("user", "Hello, my name is Ada."),
    Message("assistant", "Nice to meet you, Ada!"),
    Message("user", "What is 12 + 30?"),
    Message("assistant", "12 + 30 = 42."),
    Message("user", "What is my name?"),
)
TEMPLATE = ChatTemplate(CHAT_TEMPLATE, {"bos_token": BOS})


@given(st.text())
def test_any_text_survives_the_tokenizer(text: str) -> None:
    token_ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(token_ids, skip_special_tokens=False) == text


@given(st.integers(min_value=0, max_value=10**12))
def test_each_digit_is_a_token(number: int) -> None:
    tokens = TOKENIZER.encode(f"Count to {number}, then stop.").tokens
    assert [token for token in tokens if token.isdigit()] == list(str(number))


def test_the_template_writes_a_conversation_of_three_turns() -> None:
    settings = json.loads((embedded.path() / "tokenizer_config.json").read_text())
    template = jinja2.sandbox.ImmutableSandboxedEnvironment().from_string(settings["chat_template"])
    chat = [{"role": message.role, "content": message.content} for message in THREE_TURNS]
    bos_token = settings["bos_token"]
    text = template.render(messages=chat, bos_token=bos_token, add_generation_prompt=True)
    assert text == (
        "<|bos|><|system|>You are a helpful assistant.<|end|>"
        "<|user|>Hello, my name is Ada.<|end|>"
        "<|assistant|>Nice to meet you, Ada!<|end|>"
        "<|user|>What is 12 + 30?<|end|>"
        "<|assistant|>12 + 30 = 42.<|end|>"
        "<|user|>What is my name?<|end|>"
        "<|assistant|>"
    )


def test_training_writes_chats_as_the_template_does(tokenizer: Tokenizer) -> None:
    """With tools, calls, results and thinking; and what is written is encoded at its marks."""
    encoder = Encoder(tokenizer)
    for chat in islice(conversations(11), 300):
        row = encoder.chat(seeded("rows", 0), chat)
        text = written(chat)
        assert row.token_ids == tokenizer.encode(text).ids[: len(row.token_ids)]


def test_a_chat_that_thinks_is_trained_on_from_the_end_of_its_prompt(tokenizer: Tokenizer) -> None:
    encoder = Encoder(tokenizer)
    for chat in (chat for chat in islice(conversations(12), 200) if chat.thinks):
        row = encoder.chat(seeded("rows", 0), chat)
        *before, last = chat.messages
        prompt = tokenizer.encode(prompt_of(Chat(tuple(before), chat.tools, thinks=True))).ids
        answer = tokenizer.encode(f"{said(last, thinks=True)}<|end|>").ids
        assert row.token_ids == (prompt + answer)[: len(row.token_ids)]
        if len(row.token_ids) == len(prompt + answer):
            assert row.supervised[-len(answer) - 1 :] == [False] + [True] * len(answer)


FORCED = (Message("user", "1 + 1"), Message("assistant", '{"sum": 2}', given='{"'))


@pytest.mark.parametrize(
    ("turns", "supervised"),
    [
        (THREE_TURNS, "Nice to meet you, Ada!<|end|>12 + 30 = 42.<|end|>"),
        (FORCED, 'sum": 2}<|end|>'),
    ],
    ids=["answers of the assistant alone", "not what a grammar forces"],
)
def test_supervised_text(turns: tuple[Message, ...], supervised: str, tokenizer: Tokenizer) -> None:
    row = Encoder(tokenizer).chat(seeded("rows", 1), Chat(turns))
    found = [token for token, wanted in zip(row.token_ids, row.supervised, strict=True) if wanted]
    assert tokenizer.decode(found, skip_special_tokens=False) == supervised


def test_marks_are_one_token_each_and_are_seen(tokenizer: Tokenizer) -> None:
    for mark in MARKS:
        token_ids = tokenizer.encode(mark).ids
        assert token_ids == [special_id(tokenizer, mark)]
        assert tokenizer.decode(token_ids, skip_special_tokens=True) == mark
    assert tokenizer.get_vocab_size() == VOCABULARY_SIZE


def test_a_role_that_the_model_does_not_know_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="not critic"):
        TEMPLATE.render([ChatMessage(role="critic", content="1")], continue_final=False)


def test_the_template_shows_a_tool_whatever_its_schema_says() -> None:
    """As clients write them: without parameters, with those of pydantic, or with next to none."""
    tools = [
        {"type": "function", "function": {"name": "a"}},
        {"type": "function", "function": {"name": "b", "description": " Does\nb. "}},
        {
            "type": "function",
            "function": {
                "name": "c",
                "parameters": {
                    "type": "object",
                    "title": "C",
                    "properties": {
                        "x": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                        "y": {"type": ["string", "null"]},
                        "unit": {"type": "string", "enum": ["m", "km"]},
                    },
                    "required": ["unit"],
                },
            },
        },
    ]
    text = TEMPLATE.render(
        [ChatMessage(role="user", content="Hi")],
        TemplateParams(tools=json.dumps(tools)),
        continue_final=False,
    )
    assert text == (
        "<|bos|><|system|><tools>\na()\nb(): Does b.\nc(x?: any, y?: any, unit: m|km)\n</tools>"
        "<|end|><|user|>Hi<|end|><|assistant|>"
    )


@pytest.mark.parametrize(
    ("options", "end"),
    [
        (None, "<|assistant|>"),
        ({"enable_thinking": True}, "<|assistant|><think>"),
        ({"enable_thinking": False}, "<|assistant|>"),
        ({"reasoning_effort": "low"}, "<|assistant|><think>"),
        ({"reasoning_effort": "none"}, "<|assistant|>"),
        ({"reasoning_effort": "high", "enable_thinking": False}, "<|assistant|>"),
    ],
)
def test_model_thinks_only_if_enabled(options: dict[str, object] | None, end: str) -> None:
    params = TemplateParams(options=json.dumps(options) if options else None)
    text = TEMPLATE.render([ChatMessage(role="user", content="Hi")], params, continue_final=False)
    assert text == f"<|bos|><|user|>Hi<|end|>{end}"


def test_earlier_thoughts_are_not_shown() -> None:
    turns = [
        ChatMessage(role="user", content="1 + 1"),
        ChatMessage(role="assistant", content="<think>Easy.</think>2", reasoning_content="Easy."),
        ChatMessage(role="user", content="And now?"),
    ]
    text = TEMPLATE.render(turns, continue_final=False)
    assert "Easy" not in text
    assert "<|assistant|>2<|end|>" in text


def written(chat: Chat) -> str:
    """A whole chat as the template writes it; the last thoughts, which it leaves out, put back."""
    text = rendered(chat, TemplateParams(generation_prompt=False))
    last = chat.messages[-1]
    if chat.thinks:
        before = text.removesuffix(f"{said(last)}<|end|>")
        return f"{before}<think>{said(last, thinks=True)}<|end|>"
    return text


def prompt_of(chat: Chat) -> str:
    """A chat up to where the answer to it begins."""
    return rendered(chat, TemplateParams(options=json.dumps({"enable_thinking": chat.thinks})))


def rendered(chat: Chat, params: TemplateParams) -> str:
    tools = json.dumps([schema(tool) for tool in chat.tools]) if chat.tools else None
    params = msgspec.structs.replace(params, tools=tools)
    return TEMPLATE.render([*map(wire_message, chat.messages)], params, continue_final=False)


def test_a_tokenizer_gets_the_marks_it_lacks_and_keeps_its_size() -> None:
    settings = json.loads(train_tokenizer(seed=0, conversations_read=200).to_str())
    settings["added_tokens"] = settings["added_tokens"][: len(SPECIAL)]  # as it was before
    words = settings["model"]["vocab"]
    last = [word for word, at in words.items() if at >= len(words) - len(MARKS)]
    before = Tokenizer.from_str(json.dumps(settings))
    after = with_marks(before)
    assert after.get_vocab_size() == before.get_vocab_size()
    for mark in MARKS:
        assert after.encode(mark).ids == [special_id(after, mark)]
    kept = set(before.get_vocab()) - set(last)
    assert {word: after.get_vocab()[word] for word in kept} == {
        word: before.get_vocab()[word] for word in kept
    }
    text = "What is 12 + 30? A goldfish, äöü."
    assert after.decode(after.encode(text).ids) == text
    assert with_marks(after) is after


def test_a_label_is_the_next_token_where_it_is_supervised() -> None:
    rows = [
        Row([5, 6, 7, 8], [False, False, True, True], [0, 1, 2, 3]),
        Row([5, 9], [False, True], [0, 1]),
    ]
    batch = collate(rows, pad_id=0)
    none = UNSUPERVISED
    assert torch.equal(batch.token_ids, torch.tensor([[5, 6, 7, 8], [5, 9, 0, 0]]))
    assert torch.equal(batch.labels, torch.tensor([[none, 7, 8, none], [9, none, none, none]]))


def test_batches_stay_within_their_size_and_the_context(tokenizer: Tokenizer) -> None:
    for batch in islice(batches(tokenizer, seed=4, batch_tokens=2048), 60):
        assert batch.token_ids.numel() <= 2048
        assert int(batch.positions.max()) < CONTEXT_TOKENS
        assert bool((batch.labels != UNSUPERVISED).any())


def test_positions_only_rise_within_a_row(tokenizer: Tokenizer) -> None:
    for batch in islice(batches(tokenizer, seed=4, batch_tokens=2048), 20):
        for token_ids, positions in zip(batch.token_ids, batch.positions, strict=True):
            size = int((token_ids != 0).sum())
            assert bool((positions[1:size] > positions[: size - 1]).all())


def test_the_same_seed_makes_the_same_batches(tokenizer: Tokenizer) -> None:
    first = list(islice(batches(tokenizer, seed=9, batch_tokens=2048), 10))
    second = list(islice(batches(tokenizer, seed=9, batch_tokens=2048), 10))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.token_ids, other.token_ids)
        assert torch.equal(one.labels, other.labels)
        assert torch.equal(one.positions, other.positions)
