"""Fields of bodies: errors name the field, its values or its limit, however deep it is nested."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import pytest
from tests.unit.gateway.calls import BODIES, CHAT, COMPLETE, post

from antiphon.gateway.http.core import fields
from antiphon.gateway.http.core.fields import decode
from antiphon.gateway.http.native import parsing
from antiphon.gateway.http.openai.parse import parse_chat
from antiphon.gateway.http.openai.schema import ChatBody, CompletionBody
from antiphon.gateway.parsing.formats import Formats, reasoning_format, tool_format
from antiphon.gateway.parsing.grammars import after_thinking
from antiphon.wire.errors import InvalidRequest
from antiphon.wire.sampling import Grammar, GrammarKind

if TYPE_CHECKING:
    from tests.unit.gateway.cluster import House


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Inner(msgspec.Struct):
    colour: Annotated[Colour, msgspec.Meta(description="Of a part.")] | None = None
    size: Literal["small", "large"] | int = "small"


class Body(msgspec.Struct, rename={"kind": "type"}):
    kind: Literal["a", "b"] = "a"
    parts: list[Inner | str] | Inner = []
    by_name: dict[str, Inner] = {}


@pytest.mark.parametrize(
    ("body", "param", "allowed"),
    [
        (b'{"type":"c"}', "type", "'a', 'b'"),
        (b'{"parts":[{},{"colour":"green"}]}', "parts[1].colour", "'red', 'blue'"),
        (b'{"parts":{"size":"huge"}}', "parts.size", "'large', 'small'"),
        (b'{"by_name":{"x":{"colour":"green"}}}', "by_name[...].colour", "'red', 'blue'"),
    ],
)
def test_error_lists_the_values_of_a_field_of_a_fixed_set(
    body: bytes, param: str, allowed: str
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        decode(body, Body)
    assert raised.value.param == param
    assert raised.value.message.endswith(f"; allowed are {allowed}")


def test_error_lists_the_values_below_a_field_that_is_read_by_itself() -> None:
    with pytest.raises(InvalidRequest) as raised:
        decode(b'[{"colour":"green"}]', list[Inner], "parts")
    assert raised.value.message == (
        "parts[0].colour: Invalid enum value 'green'; allowed are 'red', 'blue'"
    )


def test_error_about_a_type_lists_no_values() -> None:
    with pytest.raises(InvalidRequest) as raised:
        decode(b'{"type":7}', Body)
    assert raised.value.message == "type: Expected `str`, got `int`"


CALLED = [
    {
        "role": "assistant",
        "tool_calls": [
            {"id": "i" * 2000, "type": "function", "function": {"name": "f", "arguments": "{}"}}
        ],
    }
]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (COMPLETE, {"logit_bias": dict.fromkeys(map(str, range(1025)), 1)},
         "logit_bias: 1025 entries; the limit is 1024"),
        (COMPLETE, {"top_p": 1.5}, "top_p: Expected `float` <= 1.0, got 1.5"),
        (CHAT, {"stop": ["b", "a" * 5000]}, "stop[1]: 5000 characters; the limit is 4096"),
        (CHAT, {"messages": CALLED},
         "messages[0].tool_calls[0].id: 2000 characters; the limit is 1024"),
        (CHAT, {"n": 1000}, "n: Expected `int` <= 128, got 1000"),
        (CHAT, {"temperature": -0.5}, "temperature: Expected `float` >= 0.0, got -0.5"),
        (CHAT, {"seed": 2**63},
         "seed: Expected `int` <= 9223372036854775807, got 9223372036854775808"),
        (CHAT, {"max_tokens": 10**99},
         f"max_tokens: Expected `int` <= 2147483647, got 1{39 * '0'}..."),
        (CHAT, {"regex": "a" * 200_000}, "regex: 200000 characters; the limit is 131072"),
        (COMPLETE, {"prompt": ["a"] * 300}, "prompt: 300 prompts; the limit is 256"),
        ("/detokenize", {"tokens": [[1]] * 300}, "tokens: 300 lists; the limit is 256"),
        ("/generate", {"text": "x", "sampling_params": {"stop_token_ids": [0] * 2000}},
         "sampling_params.stop_token_ids: 2000 entries; the limit is 1024"),
    ],
    ids=lambda part: part.partition(":")[0] if isinstance(part, str) else "",
)  # fmt: skip
async def test_value_beyond_its_limit_is_shown_beside_the_limit(
    at: House, path: str, body: dict[str, object], message: str
) -> None:
    status, reply, _ = await post(at, path, BODIES.get(path, {}) | body)
    assert status == 400
    error = reply["error"]
    assert (error["message"], error["param"]) == (message, message.partition(":")[0])
    assert at.cluster.encodes == []


@pytest.mark.parametrize(
    "body",
    [b'{"logit_bias": {"-1": 1}}', b'{"n": true}', b'{"n": null, "best_of": "x"}', b'{"stop": 1}'],
)
def test_value_of_another_kind_is_refused_without_a_count(body: bytes) -> None:
    with pytest.raises(InvalidRequest) as refused:
        fields.decode(body, CompletionBody)
    assert re.search(r", got [-\d]", refused.value.message) is None
    assert "; the limit is" not in refused.value.message


def test_value_beyond_its_limit_is_refused_before_a_number_of_any_length() -> None:
    body = b'{"prompt": "a", "n": 1000, "top_k": ' + b"9" * 5000 + b"}"
    with pytest.raises(InvalidRequest) as refused:
        fields.decode(body, CompletionBody)
    assert refused.value.param == "n"


FORMATS = Formats(tool_format("hermes"), reasoning_format("qwen3"))
TOOLS = '"tools": [{"type": "function", "function": {"name": "f", "parameters": %s}}]'
DEPTHS = range(1, 1100)


@pytest.mark.parametrize(
    ("said", "field"),
    [
        (TOOLS % '{"items": {"enum": DEEP}}' + ', "tool_choice": "required"', "tools"),
        (TOOLS % '{"properties": DEEP}', "tools"),
        ('"tool_choice": DEEP', "tool_choice"),
        ('"chat_template_kwargs": {"enable_thinking": DEEP}', "chat_template_kwargs"),
    ],
    ids=["an enumeration", "a schema", "a choice", "a switch"],
)
def test_a_chat_is_read_or_refused(said: str, field: str) -> None:
    refused: set[str] = set()
    for depth in DEPTHS:
        deep = said.replace("DEEP", "[" * depth + "]" * depth)
        body = '{"messages": [{"role": "user", "content": "hi"}], ' + deep + "}"
        try:
            parse_chat(fields.read(body.encode(), ChatBody)[0], FORMATS)
        except InvalidRequest as error:
            refused.add((error.param or "").partition("[")[0])
    assert refused
    assert refused <= {field, ""}


def test_tools_to_take_an_answer_apart_are_read_or_refused() -> None:
    tools = TOOLS % '{"items": {"enum": DEEP}}'
    read = refused = 0
    for depth in DEPTHS:
        deep = tools.replace("DEEP", "[" * depth + "]" * depth)
        body = '{"text": "x", "tool_call_parser": "hermes", ' + deep + "}"
        try:
            parsing.parsed_calls(fields.read(body.encode(), parsing.ParseBody)[0])
            read += 1
        except InvalidRequest:
            refused += 1
    assert read
    assert refused


def test_a_form_is_put_behind_thinking_or_refused() -> None:
    kind, format_ = GrammarKind.JSON_SCHEMA, reasoning_format("qwen3")
    refused: set[str | None] = set()
    for depth in DEPTHS:
        grammar = Grammar(kind=kind, text='{"enum": %s}' % ("[" * depth + "]" * depth))
        try:
            after_thinking(grammar, format_, inside=False, end_id=None)
        except InvalidRequest as error:
            refused.add(error.param)
    assert refused <= {"grammar"}
