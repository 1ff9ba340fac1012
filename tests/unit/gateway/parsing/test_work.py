"""How much is held back, and how much work an answer is."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
from tests.unit.gateway.parsing.renderers import FORMATS, RENDERERS

from antiphon.gateway.parsing.answer import AnswerParser
from antiphon.gateway.parsing.events import CallArguments, CallBegin, Content, Reasoning
from antiphon.gateway.parsing.formats import reasoning_format, tool_format
from antiphon.gateway.parsing.tools.tool import OfferedTools

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import FrameType

    from antiphon.gateway.parsing.tools.format import ToolFormat

OFFER = OfferedTools(schemas={"f": {"type": "object", "properties": {"a": {"type": "string"}}}})


def feed(made: AnswerParser, text: str, size: int) -> int:
    """Feed a text in pieces of a size; return the most that was held back."""
    held = 0
    for at in range(0, len(text), size):
        made.feed(text[at : at + size])
        held = max(held, made.held)
    made.end()
    return held


def steps(format_: ToolFormat, text: str) -> int:
    """Lines of ours that run while a text is read in pieces of four characters."""
    count = 0

    def trace(frame: FrameType, event: str, _: object):
        nonlocal count
        if "parsing" not in frame.f_code.co_filename:
            return None
        count += event == "line"
        return trace

    made = AnswerParser(tools=format_, offer=OFFER, reasoning=reasoning_format("qwen3"))
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        feed(made, text, 4)
    finally:
        sys.settrace(before)
    return count


def texts(format_: ToolFormat, size: int) -> Iterable[str]:
    """Long answers: text, thinking, marks that come to nothing, a long argument, many calls."""
    (render, *_) = RENDERERS[format_.names[0]]
    mark = format_.marks[0] if format_.marks else "["
    yield "some text, " * (size // 11)
    yield "<think>" + "some text, " * (size // 11)
    yield (mark[:-1] + " ") * (size // (len(mark) + 1))
    yield render("", [("f", {"a": "some text, " * (size // 11)})])
    yield render("", [("f", {"a": "b"})] * (size // 100))
    yield " " * size


@pytest.mark.parametrize("format_", FORMATS)
def test_work_grows_as_the_text_does(format_: ToolFormat):
    for short, long in zip(texts(format_, 2000), texts(format_, 4000), strict=True):
        assert steps(format_, long) < 2.2 * steps(format_, short) + 1000


@pytest.mark.parametrize("format_", FORMATS)
def test_a_megabyte_never_waits(format_: ToolFormat):
    for text in texts(format_, 100_000):
        made = AnswerParser(tools=format_, offer=OFFER, reasoning=reasoning_format("qwen3"))
        assert feed(made, text, 4) < 128


def test_a_megabyte_of_arguments_passes_in_pieces_of_four():
    text = '<tool_call>{"name": "f", "arguments": {"a": "' + "so \\n and " * 100_000
    made = AnswerParser(tools=tool_format("hermes"), offer=OFFER)
    assert feed(made, text, 4) < 64


def test_arguments_before_the_name_wait_for_it_and_then_come_at_once():
    made = AnswerParser(tools=tool_format("hermes"), offer=OFFER)
    assert made.feed('<tool_call>{"arguments": {"a": "long"}, "name": ') == []
    begin, arguments = made.feed('"f"')
    assert isinstance(begin, CallBegin)
    assert arguments == CallArguments(0, '{"a": "long"}')


def test_text_is_released_up_to_a_possible_mark():
    made = AnswerParser(tools=tool_format("hermes"), offer=OFFER)
    assert made.feed("a < b <tool_") == [Content("a < b")]
    assert made.feed("x") == [Content(" <tool_x")]
    assert made.feed(" ") == []
    assert made.feed(".") == [Content(" .")]


def test_reasoning_is_released_up_to_its_possible_end():
    made = AnswerParser(reasoning=reasoning_format("qwen3"))
    assert made.feed("<thi") == []
    assert made.feed("nk>\n") == []
    assert made.feed("so</thin") == [Reasoning("so")]
    assert made.feed("gs") == [Reasoning("</things")]
    assert made.feed("\n</think>\n") == []
    assert made.feed("Yes") == [Content("Yes")]
