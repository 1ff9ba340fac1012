"""What a model gets wrong becomes content, an incomplete call or nothing, and never an error."""

# ruff: noqa: RUF001  # some marks have bars of another script

from __future__ import annotations

import pytest

from antiphon.gateway.parsing.answer import AnswerParser, parse
from antiphon.gateway.parsing.events import Parsed
from antiphon.gateway.parsing.formats import tool_format
from antiphon.gateway.parsing.tools.tool import OfferedTools

OFFER = OfferedTools(
    schemas={"f": {"type": "object", "properties": {"a": {"type": "string"}}}, "g": {}}
)


def read(name: str, text: str, offer: OfferedTools = OFFER) -> Parsed:
    return parse(AnswerParser(tools=tool_format(name), offer=offer), list(text))


def calls(parsed: Parsed) -> list[tuple[str, str, bool]]:
    return [(call.name, call.arguments, call.complete) for call in parsed.calls]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>\nnothing like it\n</tool_call>"),
        ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
        ("hermes", '<tool_call>{"name": 3}</tool_call> and so on'),
        ("qwen3_coder", "<tool_call>\n<fun>\n</tool_call>"),
        ("deepseekv3", "<｜tool▁call▁begin｜>function f"),
        ("deepseekv31", "a <｜tool▁call▁begin｜>f<｜tool▁sep｜>no"),
        ("kimi_k2", "<|tool_call_begin|>f{}"),
        ("mistral", "[TOOL_CALLS] well"),
        ("llama3", "<|python_tag|>print(1)"),
        ("llama3", '{"name": "Ada", "parameters": "of her life"}'),
        ("llama3", '{"answer": {"name": "f"}}'),
        ("json", '[{"name": "Ada"}, {"name": "f"}]'),
        ("pythonic", "[1] is the source"),
        ("pythonic", "[Ada(born=1815)]"),
        ("glm45", "<tool_call>what is it</arg_key>"),
        ("interns1", "<|action_start|> f()"),
        ("apertus2509", "<|tools_prefix|>{}"),
        ("lfm2", "<|tool_call_start|>f(a=1)"),
        ("gpt-oss", "<|channel|>final to be"),
    ],
)
def test_a_mark_without_a_call_is_content(name: str, text: str):
    assert read(name, text) == Parsed(content=text)


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": "b', '{"a": "b'),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": <b', '{"a": '),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1]}}</tool_call>', '{"a": 1'),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}</tool_call>', '{"a": 1}'),
        ("hermes", '<tool_call>\n{"name": "f"', ""),
        ("json", '[{"name": "f", "parameters": {"a": "b"', '{"a": "b"'),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>\nb", '{"a": "b'),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>b</parameter>", '{"a": "b"'),
        ("glm45", "<tool_call>f\n<arg_key>a</arg_key><arg_value>b<", '{"a": "b<'),
        ("kimi_k2", '<|tool_call_begin|>f<|tool_call_argument_begin|>{"a": ', '{"a": '),
        ("pythonic", "[f(a='b", '{"a": "b'),
        ("pythonic", "[f(a=b())]", '{"a": '),
        ("llama3", '<|python_tag|>{"name": "f", "parameters": {"a"', '{"a"'),
        ("gpt-oss", '<|channel|>commentary to=functions.f<|message|>{"a": [', '{"a": ['),
    ],
)
def test_call_that_is_cut_or_broken_keeps_its_text_and_is_incomplete(
    name: str, text: str, arguments: str
):
    parsed = read(name, text)
    assert calls(parsed) == [("f", arguments, False)]
    assert parsed.content == ""


def test_what_stands_between_a_broken_call_and_its_end_is_dropped():
    text = '<tool_call>{"name": "f", "arguments": {]}, so}</tool_call> Yes.'
    parsed = read("hermes", text)
    assert calls(parsed) == [("f", "{", False)]
    assert parsed.content == " Yes."


def test_one_bracket_too_many_breaks_nothing():
    parsed = read("hermes", '<tool_call>{"name": "f", "arguments": {}}}</tool_call>')
    assert calls(parsed) == [("f", "{}", True)]
    assert parsed.content == ""


def test_a_call_without_its_end_is_followed_by_the_next():
    text = '<tool_call>{"name": "f", "arguments": {}}\n<tool_call>{"name": "g"}</tool_call>'
    assert calls(read("hermes", text)) == [("f", "{}", True), ("g", "{}", True)]


@pytest.mark.parametrize("arguments", ["null", "{}"])
def test_null_arguments_are_none(arguments: str):
    text = f'<tool_call>{{"arguments": {arguments}, "name": "f"}}</tool_call>'
    assert calls(read("hermes", text)) == [("f", "{}", True)]


def test_calls_of_unknown_tools_are_text():
    text = '<tool_call>{"name": "h", "arguments": {"a": 1}}</tool_call>'
    assert read("hermes", text) == Parsed(content=text)
    assert read("hermes", f"So.\n{text}\n{text}").content == f"So.\n{text}\n{text}"
    assert read("hermes", text[:-15]).content == text[:-15]


def test_text_after_a_call_is_content_and_white_space_around_calls_is_dropped():
    text = 'So.\n<tool_call>{"name": "f"}</tool_call>\n\n<tool_call>{"name": "g"}</tool_call>\n'
    assert read("hermes", text).content == "So."
    assert read("hermes", text + "Then.").content == "So.\nThen."


def test_calls_beyond_the_most_are_dropped():
    text = '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g"}</tool_call>'
    assert calls(read("hermes", text, OfferedTools(schemas=OFFER.schemas, calls_max=1))) == [
        ("f", "{}", True)
    ]


@pytest.mark.parametrize("name", ["hermes", "pythonic", "json", "mistral"])
@pytest.mark.parametrize("bracket", ["[", "{", "{'a':", '{"a":', "("])
def test_a_thousand_brackets_are_no_error(name: str, bracket: str):
    begin = {"hermes": '<tool_call>{"name": "f", "arguments": ', "pythonic": "[f(a="}.get(name, "")
    parsed = read(name, begin + bracket * 2000)
    assert all(not call.complete for call in parsed.calls)


def test_ids_are_those_that_the_formats_templates_take_back():
    (kimi,) = read(
        "kimi_k2",
        "<|tool_call_begin|>functions.f:7<|tool_call_argument_begin|>{}<|tool_call_end|>",
        OfferedTools(schemas=OFFER.schemas, calls_before=3),
    ).calls
    (mistral,) = read("mistral", '[TOOL_CALLS] [{"name": "f"}]').calls
    (hermes,) = read("hermes", '<tool_call>{"name": "f"}</tool_call>').calls
    assert kimi.id == "functions.f:3"
    assert len(mistral.id) == 9
    assert mistral.id.isalnum()
    assert hermes.id.startswith("call_")
    assert len(hermes.id) == len("call_") + 24
