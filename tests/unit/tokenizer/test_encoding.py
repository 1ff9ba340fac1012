"""Prompts become ids and ids texts, errors stay with their own text, gaps are filled."""

from __future__ import annotations

import hashlib
import json
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from antiphon import embedded
from antiphon.config.errors import ConfigError
from antiphon.config.model import TEMPLATES, CompletionTemplate
from antiphon.tokenizer import model_tokenizer as vocabulary
from antiphon.tokenizer.encoding import EncodedPrompt, TextEncoder, decode, is_heavy
from antiphon.tokenizer.template import ChatTemplate
from antiphon.wire.codec import pack_ids, unpack_ids
from antiphon.wire.digests import BLOCK_TOKENS, block_digests
from antiphon.wire.errors import Internal, InvalidRequest, RequestTooLarge, Unsupported
from antiphon.wire.ids import ModelName, RequestId
from antiphon.wire.namespaces import PageOrigin, announced_root, cache_namespace, cache_salt
from antiphon.wire.tokenize import (
    ChatMessage,
    DecodeRequest,
    EncodeRequest,
    MessageToolCall,
    TemplateParams,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ORIGIN = PageOrigin(model_digest="model")
ROOT = announced_root(cache_namespace(ORIGIN))


def asks(
    messages: tuple[ChatMessage, ...] | None, prompt: str | None, **fields: Any
) -> EncodeRequest:
    return EncodeRequest(
        request_id=RequestId("r"),
        model=ModelName("m"),
        messages=messages,
        prompt=prompt,
        deadline_unix_ms=2**42,
        **fields,
    )


def user_turn(content: str) -> tuple[ChatMessage, ...]:
    """A conversation of one turn."""
    return (ChatMessage(role="user", content=content),)


HELLO = user_turn("Hello")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer of words that adds `<s>` to plain text, and no chat template."""
    write(tmp_path)
    return tmp_path


@contextmanager
def changed_tokenizer(folder: Path) -> Iterator[Tokenizer]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    yield tokenizer
    tokenizer.save(str(folder / "tokenizer.json"))


def encoder(folder: Path, bytes_max: int = 1000, context_tokens: int = 2**31) -> TextEncoder:
    return TextEncoder(vocabulary.read_model_tokenizer(folder), ORIGIN, bytes_max, context_tokens)


def encode(folder: Path, text: EncodeRequest, bytes_max: int = 1000) -> EncodedPrompt | Exception:
    (result,) = encoder(folder, bytes_max).encode([text])
    return result


def ids(result: EncodedPrompt | Exception) -> list[int]:
    assert isinstance(result, EncodedPrompt)
    return list(unpack_ids(result.token_ids))


def test_plain_text_gets_the_tokenizers_special_tokens(folder: Path):
    assert ids(encode(folder, asks(None, "a b"))) == [0, 2, 3]


@pytest.mark.parametrize("length", [None, 4])
def test_tokenizer_pads_no_text_whatever_its_file_sets(folder: Path, length: int | None):
    with changed_tokenizer(folder) as tokenizer:
        tokenizer.enable_padding(length=length, pad_to_multiple_of=8, pad_id=1, pad_token="<unk>")
    assert ids(encode(folder, asks(None, "a b"))) == [0, 2, 3]
    assert ids(encode(folder, asks(None, "a", pair="b"))) == [2, 3]


@pytest.mark.parametrize("direction", ["left", "right"])
def test_tokenizer_cuts_no_text_whatever_its_file_sets(folder: Path, direction: str):
    with changed_tokenizer(folder) as tokenizer:
        tokenizer.enable_truncation(max_length=3, direction=direction)
    assert ids(encode(folder, asks(None, "a b a b a"))) == [0, 2, 3, 2, 3, 2]


def test_a_template_writes_its_own_special_tokens(folder: Path):
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert ids(encode(folder, asks(user_turn("a"), None))) == [2]


def test_long_text_is_rejected_with_both_numbers(folder: Path):
    error = encode(folder, asks(None, "a" * 11), bytes_max=10)
    assert isinstance(error, RequestTooLarge)
    assert error.details == {"size_bytes": "11", "bytes_max": "10"}


@pytest.mark.parametrize(
    ("text", "bytes_max", "error"),
    [
        pytest.param(asks(HELLO, None), 1000, Unsupported, id="no chat template"),
        pytest.param(asks(None, None), 1000, InvalidRequest, id="neither prompt nor messages"),
        pytest.param(asks(HELLO, "a"), 1000, InvalidRequest, id="both prompt and messages"),
        pytest.param(asks((), None), 1000, InvalidRequest, id="no messages"),
        pytest.param(asks(None, "\ud800"), 1000, InvalidRequest, id="lone surrogate"),
        pytest.param(
            asks(None, "a" * 6, pair="b" * 6), 10, RequestTooLarge, id="both texts of a pair"
        ),
    ],
)
def test_text_that_cannot_be_encoded_is_rejected(
    folder: Path, text: EncodeRequest, bytes_max: int, error: type[Exception]
):
    assert isinstance(encode(folder, text, bytes_max), error)


def test_an_error_hurts_no_other_text(folder: Path):
    bad, good = encoder(folder).encode([asks(HELLO, None), asks(None, "a")])
    assert isinstance(bad, Unsupported)
    assert ids(good) == [0, 2]


def test_bug_with_one_text_is_raised_to_its_caller_only(
    folder: Path, caplog: pytest.LogCaptureFixture
):
    (folder / "chat_template.jinja").write_text("{{ 'a' * (messages[0].content | int) }}")
    bad, good = encoder(folder).encode([asks(user_turn(n), None) for n in (f"{10**18}", "1")])
    assert isinstance(bad, Internal)
    assert ids(good) == [2]
    (record,) = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[0] is MemoryError


@pytest.mark.parametrize(
    ("field", "indent", "every"),
    [
        ("tools", "", True),
        ("chat_template_kwargs", "indent=2", False),
        ("messages", "indent=2", False),
        pytest.param("tools", "indent=2", False, marks=pytest.mark.long),
        pytest.param("chat_template_kwargs", "", True, marks=pytest.mark.long),
        pytest.param("messages", "", True, marks=pytest.mark.long),
    ],
)
def test_what_is_nested_too_deep_is_the_callers_error_at_every_depth(
    folder: Path, field: str, indent: str, every: bool
):
    """Every depth between two of which one fails, or fails otherwise, is tried, too."""
    given = {"tools": "tools", "chat_template_kwargs": "x", "messages": "messages[0].tool_calls"}
    (folder / "chat_template.jinja").write_text(f"{{{{ {given[field]} | tojson({indent}) }}}}")
    nested_encoder = encoder(folder, 100_000_000)
    params = {
        "tools": lambda deep: TemplateParams(tools=f'[{{"x": {deep}}}]'),
        "chat_template_kwargs": lambda deep: TemplateParams(options=f'{{"x": {deep}}}'),
    }

    def error_at(depth: int) -> Exception | None:
        deep = "[" * depth + "]" * depth
        call = MessageToolCall(id="c", name="f", arguments=f'{{"x": {deep}}}')
        turn = ChatMessage(
            role="user", content="a", tool_calls=(call,) if field == "messages" else ()
        )
        template = params[field](deep) if field in params else TemplateParams()
        (done,) = nested_encoder.encode([asks((turn,), None, template=template)])
        return done if isinstance(done, Exception) else None

    errors = {depth: error_at(depth) for depth in range(1, 1100, 37)}
    for near, far in pairwise([*errors]):
        if every and str(errors[near]) != str(errors[far]):
            errors |= {depth: error_at(depth) for depth in range(near + 1, far)}
    found = [error for error in errors.values() if error is not None]
    assert {type(error) for error in found} == {InvalidRequest}
    assert {getattr(error, "param", None) for error in found} == {field}


def test_a_broken_card_names_its_file(folder: Path):
    (folder / "tokenizer_config.json").write_text('{"chat_template": 3}')
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        vocabulary.read_model_tokenizer(folder)


def test_the_embedded_model_encodes_a_conversation():
    assert len(ids(encode(embedded.path(), asks(HELLO, None)))) > 3


def test_blocks_are_chained_by_hand():
    tokens = pack_ids(range(2 * BLOCK_TOKENS + 5))
    first = hashlib.sha256(ROOT + tokens[: 4 * BLOCK_TOKENS]).digest()
    second = hashlib.sha256(first + tokens[4 * BLOCK_TOKENS : 8 * BLOCK_TOKENS]).digest()
    assert block_digests(ROOT, tokens) == first + second


@given(st.lists(st.integers(0, 9), max_size=200), st.lists(st.integers(0, 9), max_size=200))
def test_equal_prefixes_have_equal_digests(one: list[int], other: list[int]):
    blocks = [block_digests(ROOT, pack_ids(ids)) for ids in (one, other)]
    for end in range(1, min(map(len, blocks)) // 32 + 1):
        same = one[: end * BLOCK_TOKENS] == other[: end * BLOCK_TOKENS]
        assert (blocks[0][: end * 32] == blocks[1][: end * 32]) == same


SALTS = (("",), (None, ""), ("a",), ("b",), (None, "a"), ("a", "a"))
"""Salt and extra key of requests; the first two have neither."""


def test_a_salt_divides_the_names_of_blocks_and_nothing_else(folder: Path):
    texts = [asks(None, "a b " * BLOCK_TOKENS, cache_salt=cache_salt(*salt)) for salt in SALTS]
    encoded = encoder(folder).encode(texts)
    digests = [one.block_digests for one in encoded if isinstance(one, EncodedPrompt)]
    assert len({one.token_ids for one in encoded if isinstance(one, EncodedPrompt)}) == 1
    assert [digests.index(one) for one in digests] == [0, 0, 2, 3, 4, 5]
    assert digests[0] == block_digests(ROOT, encoded[0].token_ids)  # type: ignore[union-attr]


def test_two_texts_are_joined_as_the_tokenizer_joins_them(folder: Path):
    pair = asks(None, "a b", pair="b a a")
    assert isinstance(encode(folder, pair), EncodedPrompt)
    with changed_tokenizer(folder) as tokenizer:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s>:0 $B:1", special_tokens=[("<s>", 0)]
        )
    for text, joined, second_from in (
        (pair, [0, 2, 3, 0, 3, 2, 2], 4),
        (asks(None, "a b"), [0, 2, 3], None),
    ):
        encoded = encode(folder, text)
        assert isinstance(encoded, EncodedPrompt)
        assert (ids(encoded), encoded.second_from) == (joined, second_from)


def truncate(folder: Path, text: EncodeRequest, context_tokens: int) -> EncodedPrompt:
    """Encode a text under a context; it must not be refused."""
    (result,) = encoder(folder, 100_000, context_tokens).encode([text])
    assert isinstance(result, EncodedPrompt)
    return result


@pytest.mark.parametrize("words", [1, BLOCK_TOKENS, 3 * BLOCK_TOKENS])
@pytest.mark.parametrize("context_tokens", [BLOCK_TOKENS - 1, 2 * BLOCK_TOKENS])
def test_truncated_prompt_is_the_beginning_of_the_whole_one(
    folder: Path, words: int, context_tokens: int
):
    whole = encode(folder, asks(None, "a b " * words))
    made = truncate(folder, asks(None, "a b " * words, truncate=True), context_tokens)
    assert ids(made) == ids(whole)[:context_tokens]
    assert made.block_digests == block_digests(ROOT, made.token_ids)
    fits = len(ids(whole)) <= context_tokens
    assert made.untruncated_tokens == (None if fits else 2 * words + 1)


def test_truncated_conversation_has_no_end_to_be_read(folder: Path):
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }} <think>")
    text = asks(user_turn("a b a b"), None, truncate=True)
    assert truncate(folder, text, 9).text_end == "a b a b <think>"
    assert truncate(folder, text, 3).text_end == ""


def test_pair_is_truncated_as_long_as_some_of_the_second_text_is_left(folder: Path):
    pair = asks(None, "a b", pair="b a a", truncate=True)  # type ids do not separate the two
    assert ids(truncate(folder, pair, 3)) == [2, 3, 3]
    assert len(ids(truncate(folder, pair, 2))) == 5  # refused by its length


LONG = "a" * 20_000
CALL = MessageToolCall(id="call_1", name="f", arguments='{"a": 1}')
TURN = ChatMessage(
    role="assistant", content="a", name="f", tool_call_id="call_1", tool_calls=(CALL,)
)


LONG_TURNS = {
    name: replace(TURN, **{name: LONG})
    for name in ("content", "role", "name", "reasoning_content", "tool_call_id")
} | {
    f"call {name}": replace(TURN, tool_calls=(replace(CALL, **{name: LONG}),))
    for name in ("id", "name", "arguments")
}


@pytest.mark.parametrize("message", LONG_TURNS.values(), ids=LONG_TURNS)
def test_text_is_heavy_by_every_part_of_a_message(message: ChatMessage) -> None:
    assert is_heavy(asks((message,), None))


@pytest.mark.parametrize(("messages", "calls", "heavy"), [(8, 1, False), (1, 65, True)])
def test_short_conversation_is_heavy_only_with_many_calls(
    messages: int, calls: int, heavy: bool
) -> None:
    turn = replace(TURN, tool_calls=(CALL,) * calls)
    assert is_heavy(asks((turn,) * messages, None)) == heavy


GAP = asks(None, "a", suffix="b")
FILE = {
    "name": "mine",
    "fim_begin_token": "[PRE]",
    "fim_middle_token": "[MID]",
    "fim_end_token": "[SUF]",
}


def write(folder: Path, *marks: str, special: bool = False) -> None:
    """A tokenizer of two words that adds `<s>`, and whose marks have the ids from 4 on."""
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "<unk>": 1, "a": 2, "b": 3}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.add_tokens([AddedToken(mark, special=special) for mark in marks])
    tokenizer.save(str(folder / "tokenizer.json"))


def encode_gap(
    folder: Path, text: EncodeRequest = GAP, template: str = "", bytes_max: int = 1000
) -> list[int]:
    words = vocabulary.read_model_tokenizer(folder, completion_template=template)
    (result,) = TextEncoder(words, ORIGIN, bytes_max, context_tokens=2**31).encode([text])
    if isinstance(result, Exception):
        raise result
    return ids(result)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.name)
def test_a_form_is_known_by_its_marks(
    tmp_path: Path, template: CompletionTemplate, special: bool
) -> None:
    write(tmp_path, *template.marks, special=special)
    assert encode_gap(tmp_path) == [0, 4, 2, 5, 3, 6]
    assert encode_gap(tmp_path, template=template.name) == [0, 4, 2, 5, 3, 6]
    assert encode_gap(tmp_path, asks(None, "", suffix="b")) == [0, 4, 5, 3, 6]
    assert encode_gap(tmp_path, asks(None, "a")) == [0, 2]


def test_the_forms_are_those_the_models_were_trained_on() -> None:
    assert [template.write("P", "S") for template in TEMPLATES] == [
        "<｜fim▁begin｜>P<｜fim▁hole｜>S<｜fim▁end｜>",  # noqa: RUF001
        "<fim_prefix>P<fim_suffix>S<fim_middle>",
        "<|fim_prefix|>P<|fim_suffix|>S<|fim_middle|>",
    ]


def test_marks_of_no_form_or_of_two_show_none_for_certain(tmp_path: Path) -> None:
    star, qwen = (template.marks for template in TEMPLATES[1:])
    for marks in ((), star[:2], (*star, *qwen)):
        write(tmp_path, *marks)
        with pytest.raises(Unsupported, match="--completion-template") as refused:
            encode_gap(tmp_path)
        assert refused.value.param == "suffix"
    assert encode_gap(tmp_path, template="qwen_coder") == [0, 7, 2, 8, 3, 9]


def test_a_mark_that_is_no_token_is_named_at_the_start(tmp_path: Path) -> None:
    write(tmp_path, *TEMPLATES[1].marks[:2])
    with pytest.raises(ConfigError, match=r"star_coder: the tokenizer has no token <fim_middle>$"):
        vocabulary.read_model_tokenizer(tmp_path, completion_template="star_coder")


@pytest.mark.parametrize(
    ("position", "ids"), [("MIDDLE", [0, 4, 2, 5, 3, 6]), ("END", [0, 4, 2, 6, 3, 5])]
)
def test_file_sets_the_position_of_the_middle_marker(
    tmp_path: Path, position: str, ids: list[int]
) -> None:
    write(tmp_path, "[PRE]", "[MID]", "[SUF]")
    file = tmp_path / "form.json"
    file.write_text(json.dumps(FILE | {"fim_position": position}))
    assert encode_gap(tmp_path, template=str(file)) == ids


@pytest.mark.parametrize("text", ["{", "{}", json.dumps(FILE | {"fim_position": "BEGIN"}), None])
def test_a_file_that_is_missing_or_broken_is_named(tmp_path: Path, text: str | None) -> None:
    write(tmp_path)
    file = tmp_path / "form.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=r"model\.completion_template: .*form\.json"):
        vocabulary.read_model_tokenizer(tmp_path, completion_template=str(file))


@pytest.mark.parametrize(
    ("text", "bytes_max", "error"),
    [
        (asks(None, "a" * 10, suffix="b" * 10), 50, RequestTooLarge),
        (asks(user_turn("a"), None, suffix="b"), 1000, InvalidRequest),
    ],
    ids=["both sides of the gap count", "a conversation has no gap"],
)
def test_text_with_a_gap_is_rejected(
    tmp_path: Path, text: EncodeRequest, bytes_max: int, error: type[Exception]
) -> None:
    write(tmp_path, *TEMPLATES[1].marks)
    with pytest.raises(error):
        encode_gap(tmp_path, text, bytes_max=bytes_max)


WORDS = vocabulary.read_model_tokenizer(embedded.path())


def request(*rows: list[int], skip: bool = True) -> DecodeRequest:
    return DecodeRequest(
        request_id=RequestId("r"),
        model=ModelName("m"),
        token_ids=tuple(map(pack_ids, rows)),
        skip_special_tokens=skip,
        deadline_unix_ms=0,
    )


def test_each_row_becomes_a_text():
    row = ids(encode(embedded.path(), asks(None, "one two")))
    assert decode(WORDS, request(row, [], [2, *row])) == ("one two", "", "one two")
    assert decode(WORDS, request([2, *row], skip=False)) == ("<|end|>one two",)


def test_an_id_beyond_the_vocabulary_is_refused():
    with pytest.raises(InvalidRequest, match="no token 5000"):
        decode(WORDS, request([1, 5000]))


def test_end_of_a_rendered_prompt_is_returned():
    rendered = truncate(embedded.path(), asks(user_turn("hi"), None), 2048)
    assert rendered.text_end.endswith("<|user|>hi<|end|><|assistant|>")
    assert truncate(embedded.path(), asks(None, "hi"), 2048).text_end == ""


def test_a_template_sees_tools_calls_and_variables():
    source = (
        "{% set turn = messages[0] %}{{ tools[0].function.name }} {{ style }} "
        "{{ turn.tool_calls[0].function.arguments.at }} {{ turn.reasoning_content }} "
        "{{ add_generation_prompt }}"
    )
    call = replace(CALL, arguments='{"at": "Rome"}')
    called = replace(TURN, reasoning_content="hm", tool_calls=(call,))
    params = TemplateParams(
        generation_prompt=False,
        tools='[{"type": "function", "function": {"name": "look"}}]',
        options='{"style": "short", "messages": "mine"}',
    )
    text = ChatTemplate(source, {}).render((called,), params, continue_final=False)
    assert text == "look short Rome hm False"


@pytest.mark.parametrize(
    ("params", "arguments", "param"),
    [
        (TemplateParams(tools="{}"), "{}", "tools"),
        (TemplateParams(tools="["), "{}", "tools"),
        (TemplateParams(options="[]"), "{}", "chat_template_kwargs"),
        (TemplateParams(), "{", "messages"),
    ],
)
def test_what_is_not_json_is_refused(params: TemplateParams, arguments: str, param: str):
    turn = replace(TURN, tool_calls=(replace(CALL, arguments=arguments),))
    with pytest.raises(InvalidRequest) as refused:
        ChatTemplate("x", {}).render((turn,), params, continue_final=False)
    assert refused.value.param == param
