"""JSON that is nested deep: read, or refused by the name of its field, at every depth."""

from __future__ import annotations

import pytest

from antiphon.gateway.http.core import fields
from antiphon.gateway.http.native import parsing
from antiphon.gateway.http.openai.parse import parse_chat
from antiphon.gateway.http.openai.schema import ChatBody
from antiphon.gateway.parsing.formats import Formats, reasoning_format, tool_format
from antiphon.gateway.parsing.grammars import after_thinking
from antiphon.wire.errors import InvalidRequest
from antiphon.wire.sampling import Grammar, GrammarKind

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
            parse_chat(fields.read(body.encode(), ChatBody, {})[0], FORMATS)
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
            parsing.parsed_calls(fields.read(body.encode(), parsing.ParseBody, {})[0])
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
