"""A call of a tool that was not offered is content, letter by letter as the model wrote it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.unit.gateway.parsing.renderers import FORMATS, RENDERERS
from tests.unit.gateway.parsing.test_work import feed, steps

from antiphon.gateway.parsing.answer import AnswerParser, parse
from antiphon.gateway.parsing.events import Content, Parsed
from antiphon.gateway.parsing.formats import tool_format
from antiphon.gateway.parsing.tools import json_calls, tags
from antiphon.gateway.parsing.tools.tool import OfferedTools

if TYPE_CHECKING:
    from antiphon.gateway.parsing.tools.format import ToolFormat

OFFER = OfferedTools(schemas={"f": {"type": "object", "properties": {"at": {"type": "string"}}}})
AROUND = (*json_calls.COMMAND4_AROUND, *tags.KIMI_K3_AROUND)
PIECES = [pytest.param(size, id=name) for size, name in ((0, "whole"), (1, "letters"), (5, "5"))]
OTHER, OFFERED = ("nope", {"at": "Rome", "days": 3}), ("f", {"at": "Oslo"})


def written(format_: ToolFormat, *calls: tuple[str, dict[str, object]]) -> list[str]:
    """Calls in all ways of a format, without marks of text for the reader, which are dropped."""
    texts = [render("", calls) for render in RENDERERS[format_.names[0]]]
    for mark in AROUND:
        texts = [text.replace(mark, "") for text in texts]
    return texts


def read(format_: ToolFormat, text: str, size: int) -> Parsed:
    pieces = [text[at : at + size] for at in range(0, len(text), size)] if size else [text]
    return parse(AnswerParser(tools=format_, offer=OFFER), pieces)


@pytest.mark.parametrize("size", PIECES)
@pytest.mark.parametrize("format_", FORMATS)
def test_call_of_another_tool_is_content_as_it_was_written(format_: ToolFormat, size: int):
    once, twice = written(format_, OTHER), written(format_, OTHER, ("unknown", {}))
    for text in (format_.example.replace("f", "f1"), *once, *twice, *(f"{t}\n" for t in once)):
        parsed = read(format_, text, size)
        assert parsed.content == text
        assert not parsed.calls


@pytest.mark.parametrize("size", PIECES)
@pytest.mark.parametrize("calls", [(OTHER, OFFERED), (OFFERED, OTHER), (OTHER, OFFERED, OTHER)])
@pytest.mark.parametrize("format_", FORMATS)
def test_offered_calls_beside_it_are_calls(
    format_: ToolFormat, calls: tuple[tuple[str, dict[str, object]], ...], size: int
):
    for text in written(format_, *calls):
        parsed = read(format_, text, size)
        assert [(c.name, json.loads(c.arguments), c.complete) for c in parsed.calls] == [
            (*OFFERED, True)
        ]
        assert parsed.content.count("nope") == parsed.content.count("Rome") == calls.count(OTHER)
        assert "Oslo" not in parsed.content
        if calls == (OFFERED, OTHER):
            assert parsed.content in text


@pytest.mark.parametrize("size", PIECES)
@pytest.mark.parametrize("format_", FORMATS)
def test_such_a_call_that_is_cut_off_is_content_up_to_there(format_: ToolFormat, size: int):
    for text in written(format_, OTHER):
        for end in range(text.index("nope") + 4, len(text)):
            assert read(format_, text[:end], size).content == text[:end]


@pytest.mark.parametrize("format_", FORMATS)
def test_it_comes_as_it_is_written_and_is_not_collected(format_: ToolFormat):
    for text in written(format_, ("nope", {"at": "some text, " * 4000})):
        made = AnswerParser(tools=format_, offer=OFFER)
        came = 0
        for end in range(4, len(text), 4):
            events = made.feed(text[end - 4 : end])
            came += sum(len(event.text) for event in events if isinstance(event, Content))
            if end > text.index("nope") + 64:
                assert end - came < 128


@pytest.mark.parametrize("format_", FORMATS)
def test_its_work_grows_as_the_text_does(format_: ToolFormat):
    for short, long in zip(
        written(format_, ("nope", {"at": "some text, " * 200})),
        written(format_, ("nope", {"at": "some text, " * 400})),
        strict=True,
    ):
        assert steps(format_, long) < 2.2 * steps(format_, short) + 1000


@pytest.mark.parametrize("format_", FORMATS)
def test_arguments_of_a_megabyte_pass_in_pieces_of_four(format_: ToolFormat):
    for text in written(format_, ("nope", {"at": "so and " * 20_000})):
        assert feed(AnswerParser(tools=format_, offer=OFFER), text, 4) < 128


def test_a_broken_call_of_another_tool_is_content_with_its_frame():
    text = 'So. <tool_call>{"name": "nope", "arguments": {]}, so}</tool_call> Yes.'
    assert read(tool_format("hermes"), text, 1).content == text
