"""Arguments without quotes get the types of the schema; Python's literals get JSON's."""

from __future__ import annotations

import json

import pytest

from antiphon.gateway.parsing.answer import AnswerParser, parse
from antiphon.gateway.parsing.formats import tool_format
from antiphon.gateway.parsing.tools.tool import OfferedTools
from antiphon.gateway.parsing.tools.values import converted, texts_of, types_of


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("12", {"type": "integer"}, 12),
        ("12", {"type": "string"}, "12"),
        ("1.5e3", {"type": "number"}, 1500.0),
        ("1.5", {"type": "integer"}, "1.5"),
        ("007", {"type": "integer"}, "007"),
        ("True", {"type": "boolean"}, True),
        ("true", {"type": ["string", "boolean"]}, True),
        ("null", {"type": ["string", "null"]}, None),
        ("null", {"type": "string"}, "null"),
        ("None", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, None),
        (" [1, 2]\n", {"type": "array"}, [1, 2]),
        ("[1, 2", {"type": "array"}, "[1, 2"),
        ("[1, 2]", {"type": "object"}, [1, 2]),
        ('{"a": {"b": null}}', {"type": "object"}, {"a": {"b": None}}),
        ("red", {"enum": ["red", "12"]}, "red"),
        ("12", {"enum": ["red", "12"]}, "12"),
        ("\n red ", {"enum": ["red", "12"]}, "red"),
        (" r ", {"const": " r "}, " r "),
        ("12", {}, 12),
        ('"12"', {}, "12"),
        ("NaN", {}, "NaN"),
        (" two words ", {}, " two words "),
        ("[" * 100_000, {"type": "array"}, "[" * 100_000),
    ],
)
def test_text_has_the_type_of_its_schema_or_is_a_string(
    text: str, schema: dict[str, object], value: object
):
    assert json.loads(converted(text, types_of(schema), texts_of(schema))) == value  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1_000", 1000),
        ("-07", -7),
        (".5", 0.5),
        ("1e400", None),
        ("(1, 'a',)", [1, "a"]),
        ("{1: True, 'b': None}", {"1": True, "b": None}),
        (r"'\x41\u00e9\U0001f44b\q\n'", "Aé👋\\q\n"),
        (r"'\ud83d\udc4b'", "👋"),
        ("'it\\'s' ", "it's"),
        ('"a\nb"', "a\nb"),
    ],
)
def test_pythons_literals(written: str, value: object):
    offer = OfferedTools(schemas={"f": {}})
    text = f"[f(a={written})]"
    (call,) = parse(AnswerParser(tools=tool_format("pythonic"), offer=offer), list(text)).calls
    assert call.complete is (value is not None)
    assert value is None or json.loads(call.arguments) == {"a": value}


def test_string_is_streamed_and_a_number_comes_whole():
    schema = {"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}
    made = AnswerParser(tools=tool_format("qwen3_coder"), offer=OfferedTools(schemas={"f": schema}))  # pyright: ignore[reportArgumentType]
    made.feed("<tool_call>\n<function=f>\n<parameter=a>\nlong te")
    assert [event.text for event in made.feed('xt "')] == ['xt \\"']  # pyright: ignore[reportAttributeAccessIssue]
    made.feed("</parameter>\n<parameter=b>\n")
    assert made.feed("12") == []
    assert [event.text for event in made.feed("3</parameter>")] == ["123"]  # pyright: ignore[reportAttributeAccessIssue]
