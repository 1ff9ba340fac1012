"""Formats whose calls are a name and JSON arguments."""

# ruff: noqa: RUF001  # these bars are the letters of the marks

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from antiphon.gateway.parsing import json_text
from antiphon.gateway.parsing.json_text import NAME_MAX
from antiphon.gateway.parsing.tools import objects
from antiphon.gateway.parsing.tools.format import (
    CallGrammar,
    CallOutcome,
    framed_format,
    short_id,
)

if TYPE_CHECKING:
    from antiphon.gateway.parsing.events import EventSink
    from antiphon.gateway.parsing.reader import Reader, Steps

_WORD = re.compile(r"[^<`{\n]*")
_ID = re.compile(r"[^<{\n]*")
_NAME = re.compile(r"[\w.\-]*")


def _call(reader: Reader, out: EventSink, name: str) -> Steps[CallOutcome]:
    """Read the JSON of a call after its name."""
    yield from reader.space()
    if not name or (yield from reader.peek()) != "{":
        return CallOutcome.NOTHING
    sound = yield from json_text.value(reader, out.begin(reader, name))
    out.end(reader, complete=sound)
    return CallOutcome.DONE if sound else CallOutcome.BROKEN


# DeepSeek V3, R1 and V3.1.

_BEGIN, _END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_ALL_BEGIN, _ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"


def _v3(reader: Reader, out: EventSink) -> Steps[CallOutcome]:
    """Read the kind of call, always a function, then the name and a fenced block of JSON."""
    yield from reader.word(_WORD, NAME_MAX)
    if not (yield from reader.starts(_SEPARATOR)):
        return CallOutcome.NOTHING
    name = (yield from reader.word(_WORD, NAME_MAX)).strip()
    yield from reader.space()
    yield from reader.starts("```json", "```\n")
    return (yield from _call(reader, out, name))


def _v31(reader: Reader, out: EventSink) -> Steps[CallOutcome]:
    name = (yield from reader.word(_WORD, NAME_MAX)).strip()
    if not (yield from reader.starts(_SEPARATOR)):
        return CallOutcome.NOTHING
    return (yield from _call(reader, out, name))


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


DEEPSEEK_V3 = framed_format(
    ("deepseekv3",),
    _BEGIN,
    _END,
    _v3,
    section=(_ALL_BEGIN, _ALL_END),
    example=(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    form=_form(f"function{_SEPARATOR}", "\n```json\n", "\n```"),
)
DEEPSEEK_V31 = framed_format(
    ("deepseekv31",),
    _BEGIN,
    _END,
    _v31,
    section=(_ALL_BEGIN, _ALL_END),
    example=(
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>"
    ),
    form=_form("", _SEPARATOR, ""),
)

# Kimi K2: an id that contains the name.

_KIMI = ("<|tool_call_begin|>", "<|tool_call_end|>")
_KIMI_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"


def _kimi(reader: Reader, out: EventSink) -> Steps[CallOutcome]:
    yield from reader.space()
    id_ = (yield from reader.word(_ID, NAME_MAX)).strip()
    if not (yield from reader.starts(_KIMI_ARGUMENTS)):
        return CallOutcome.NOTHING
    return (yield from _call(reader, out, re.sub(r":\d+$", "", id_).removeprefix("functions.")))


KIMI_K2 = framed_format(
    ("kimi_k2",),
    *_KIMI,
    _kimi,
    section=_KIMI_SECTION,
    example=(
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
        '<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_calls_section_end|>'
    ),
    form=CallGrammar(
        trigger=_KIMI_SECTION[0],
        begin=f"{_KIMI_SECTION[0]}{_KIMI[0]}functions.",
        middle=f":0{_KIMI_ARGUMENTS}",
        end=f"{_KIMI[1]}{_KIMI_SECTION[1]}",
        marks=(*_KIMI, *_KIMI_SECTION, _KIMI_ARGUMENTS),
        excludes=_KIMI[:1],
    ),
    # The id that the model's template uses: calls are counted over the whole conversation.
    call_id=lambda name, number: f"functions.{name}:{number}",
)

# Mistral: also a list of objects.


def _mistral(reader: Reader, out: EventSink) -> Steps[CallOutcome]:
    yield from reader.space()
    if (yield from reader.peek()) in {"[", "{"}:
        return (yield from objects.calls(reader, out))
    name = yield from reader.word(_NAME, NAME_MAX)
    if (yield from reader.starts("[CALL_ID]", "[ARGS]")) == "[CALL_ID]":
        yield from reader.word(_NAME, NAME_MAX)
        yield from reader.starts("[ARGS]")
    return (yield from _call(reader, out, name))


MISTRAL = framed_format(
    ("mistral",),
    "[TOOL_CALLS]",
    None,
    _mistral,
    example='[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]\n[TOOL_CALLS]f[ARGS]{"a": 1}',
    call_id=short_id,  # its templates reject longer ids in the next turn
)

# Apertus: a list of objects with one key each, the name.


def _apertus(reader: Reader, out: EventSink) -> Steps[CallOutcome]:
    yield from reader.space()
    if not (yield from reader.starts("[")):
        return CallOutcome.NOTHING
    outcome = CallOutcome.NOTHING
    while True:
        yield from reader.space()
        if (yield from reader.starts("]", "{")) != "{":
            return outcome
        yield from reader.space()
        name = yield from json_text.text(reader)
        yield from reader.space()
        if not name or not (yield from reader.starts(":")):
            return outcome
        yield from reader.space()
        sound = yield from json_text.arguments(reader, out.begin(reader, name))
        yield from reader.space()
        sound = sound and (yield from reader.starts("}")) is not None
        out.end(reader, complete=sound)
        if not sound:
            return CallOutcome.BROKEN
        outcome = CallOutcome.DONE
        yield from reader.space()
        yield from reader.starts(",")


APERTUS = framed_format(
    ("apertus2509",),
    "<|tools_prefix|>",
    "<|tools_suffix|>",
    _apertus,
    example='<|tools_prefix|>[{"f": {"a": 1}}]<|tools_suffix|>',
)
