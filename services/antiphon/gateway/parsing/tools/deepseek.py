"""DeepSeek V3, R1 and V3.1: name and JSON between special tokens."""

# ruff: noqa: RUF001  # these bars are the letters of the marks

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from antiphon.gateway.parsing import json_text
from antiphon.gateway.parsing.json_text import NAME_MAX
from antiphon.gateway.parsing.tools.format import CallGrammar, CallOutcome, ToolFormat, framed

if TYPE_CHECKING:
    from antiphon.gateway.parsing.event_sink import EventSink
    from antiphon.gateway.parsing.reader import Reader, Steps

_BEGIN, _END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_ALL_BEGIN, _ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_NAME = re.compile(r"[^<`{\n]*")


def _v3(reader: Reader, out: EventSink) -> Steps[CallOutcome]:
    """Read the kind of call, always a function, then the name and a fenced block of JSON."""
    yield from reader.word(_NAME, NAME_MAX)
    if not (yield from reader.starts(_SEPARATOR)):
        return CallOutcome.NOTHING
    name = (yield from reader.word(_NAME, NAME_MAX)).strip()
    yield from reader.space()
    yield from reader.starts("```json", "```\n")
    return (yield from call(reader, out, name))


def _v31(reader: Reader, out: EventSink) -> Steps[CallOutcome]:
    name = (yield from reader.word(_NAME, NAME_MAX)).strip()
    if not (yield from reader.starts(_SEPARATOR)):
        return CallOutcome.NOTHING
    return (yield from call(reader, out, name))


def call(reader: Reader, out: EventSink, name: str) -> Steps[CallOutcome]:
    """Read the JSON of a call after its name."""
    yield from reader.space()
    if not name or (yield from reader.peek()) != "{":
        return CallOutcome.NOTHING
    sound = yield from json_text.value(reader, out.begin(reader, name))
    out.end(reader, complete=sound)
    return CallOutcome.DONE if sound else CallOutcome.BROKEN


def _form(before: str, middle: str, after: str) -> CallGrammar:
    """A grammar form of one call in a section of its own."""
    return CallGrammar(
        trigger=_ALL_BEGIN,
        begin=f"{_ALL_BEGIN}{_BEGIN}{before}",
        middle=middle,
        end=f"{after}{_END}{_ALL_END}",
        marks=(_ALL_BEGIN, _BEGIN, _SEPARATOR, _END, _ALL_END),
        excludes=(_BEGIN,),
    )


V3 = ToolFormat(
    names=("deepseekv3",),
    example=(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    read=framed(_BEGIN, _END, _v3, section=(_ALL_BEGIN, _ALL_END)),
    marks=(_ALL_BEGIN, _BEGIN),
    special=True,
    form=_form(f"function{_SEPARATOR}", "\n```json\n", "\n```"),
)
V31 = ToolFormat(
    names=("deepseekv31",),
    example=(
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>"
    ),
    read=framed(_BEGIN, _END, _v31, section=(_ALL_BEGIN, _ALL_END)),
    marks=(_ALL_BEGIN, _BEGIN),
    special=True,
    form=_form("", _SEPARATOR, ""),
)
