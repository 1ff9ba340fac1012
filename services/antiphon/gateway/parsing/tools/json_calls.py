"""Formats whose calls are JSON: an object with the name in it, or a name and its arguments."""

# ruff: noqa: RUF001  # some marks have bars of another script

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from antiphon.gateway.parsing import json_text
from antiphon.gateway.parsing.json_text import NAME_MAX
from antiphon.gateway.parsing.reader import AFTER_CALLS, TRIM_MAX, WHITE, Emit, Reader, Steps, drop
from antiphon.gateway.parsing.tools.format import (
    Body,
    CallGrammar,
    CallOutcome,
    ToolFormat,
    after,
    framed,
    framed_format,
    short_id,
)

if TYPE_CHECKING:
    from antiphon.gateway.parsing.events import EventSink

_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters")
_BESIDE = ("type", "id", "tool_call_id")


def call(reader: Reader, out: EventSink) -> Steps[CallOutcome]:
    """Read `{"name": ..., "arguments": ...}`. Other keys are skipped."""
    return (yield from _Object(reader, out, certain=True).read())


def likely_call(reader: Reader, out: EventSink) -> Steps[CallOutcome]:
    """Read an object that may be content.

    It is a call if it names an available tool, or has a name and arguments.
    """
    return (yield from _Object(reader, out, certain=False).read())


def calls(reader: Reader, out: EventSink, one: Body = call) -> Steps[CallOutcome]:
    """Read one call or a list of calls. If the first one is not a call, none is."""
    yield from reader.space()
    if not (yield from reader.starts("[")):
        return (yield from one(reader, out))
    return (yield from calls_in_list(reader, out, one))


def calls_in_list(reader: Reader, out: EventSink, one: Body = call) -> Steps[CallOutcome]:
    outcome = CallOutcome.NOTHING
    while True:
        yield from reader.space()
        if (yield from reader.starts("]")):
            return outcome
        if outcome is CallOutcome.DONE and (yield from reader.starts(",")):
            continue
        again = yield from one(reader, out)
        if again is not CallOutcome.DONE:
            return CallOutcome.BROKEN if outcome is CallOutcome.DONE else again
        outcome = again
        one = call  # a list whose first item is a call has only calls


class _Object:
    def __init__(self, reader: Reader, out: EventSink, *, certain: bool) -> None:
        self._reader = reader
        self._out = out
        self._certain = certain
        self._emit: Emit | None = None
        self._early: list[str] = []  # arguments that came before the name

    def read(self) -> Steps[CallOutcome]:
        reader = self._reader
        yield from reader.space()
        if not (yield from reader.starts("{")):
            return CallOutcome.NOTHING
        argued = False
        while True:
            yield from reader.space()
            if (yield from reader.starts("}")):
                return self._finish(argued=argued)
            key = yield from json_text.text(reader)
            yield from reader.space()
            if key is None or not (yield from reader.starts(":")):
                return self._broken()
            yield from reader.space()
            is_arguments = key in _ARGUMENTS and not argued
            argued = argued or is_arguments
            if not (yield from self._value(key, is_arguments=is_arguments)):
                return self._broken()
            yield from reader.space()
            if not (yield from reader.starts(",")) and (yield from reader.peek()) != "}":
                return self._broken()

    def _value(self, key: str, *, is_arguments: bool) -> Steps[bool]:
        if key in _NAMES and self._emit is None:
            return (yield from self._name())
        if is_arguments:
            emit = self._emit or self._early.append
            return (yield from json_text.arguments(self._reader, emit))
        if not self._certain and self._emit is None and key not in _BESIDE:
            return False
        return (yield from json_text.value(self._reader, drop))

    def _name(self) -> Steps[bool]:
        name = yield from json_text.text(self._reader)
        if name is None:
            return False
        self._certain = self._certain or self._out.knows(name)
        self._emit = self._out.begin(self._reader, name)
        self._emit("".join(self._early))
        return True

    def _broken(self) -> CallOutcome:
        if self._emit is None:
            return CallOutcome.NOTHING
        self._out.end(self._reader, complete=False)
        return CallOutcome.BROKEN

    def _finish(self, *, argued: bool) -> CallOutcome:
        if self._emit is None:
            return CallOutcome.NOTHING
        if not argued:
            if not self._certain:
                return CallOutcome.NOTHING
            self._emit("{}")
        self._out.end(self._reader, complete=True)
        return CallOutcome.DONE


HERMES = framed_format(
    ("hermes", "qwen", "qwen25", "trinity"),
    "<tool_call>",
    "</tool_call>",
    call,
    example='<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
    special=False,
    form=CallGrammar(
        trigger="<tool_call>",
        begin='<tool_call>\n{"name": "',
        middle='", "arguments": ',
        end="}\n</tool_call>",
        separator="\n",
    ),
)

COMMAND4_AROUND = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
COMMAND4 = framed_format(
    ("cohere_command4",),
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    calls,
    example=(
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}}]'
        "<|END_ACTION|>"
    ),
    around=COMMAND4_AROUND,
)

INTERN = framed_format(
    ("interns1",),
    "<|action_start|>",
    "<|action_end|>",
    after("<|plugin|>", call),
    example='<|action_start|> <|plugin|>\n{"name": "f", "parameters": {"a": 1}}<|action_end|>',
)


def _whole_output(reader: Reader, out: EventSink) -> Steps[None]:
    reader.keep()
    yield from reader.word(WHITE, TRIM_MAX)
    outcome = yield from calls(reader, out, likely_call)
    if out.settle(reader):
        yield from reader.rest(out.content)
    elif outcome is CallOutcome.BROKEN:
        yield from reader.rest(drop)
    else:
        yield from reader.until(AFTER_CALLS, out.content)


JSON_CALLS = ToolFormat(
    names=("json",), example='[{"name": "f", "parameters": {"a": 1}}]', read=_whole_output
)
"""A list of calls, or one call. Used if calls are required and the model's format has no `form`."""


def _row(one: Body) -> Body:
    """Create a reader of calls separated by semicolons."""

    def body(reader: Reader, out: EventSink) -> Steps[CallOutcome]:
        outcome = yield from one(reader, out)
        while outcome is CallOutcome.DONE:
            yield from reader.space()
            if not (yield from reader.starts(";")):
                return outcome
            yield from reader.space()
            if (yield from reader.peek()) != "{":
                return outcome
            again = yield from call(reader, out)
            # Anything other than a further call ends the row.
            outcome = CallOutcome.BROKEN if again is CallOutcome.NOTHING else again
        return outcome

    return body


_PYTHON_TAG = "<|python_tag|>"
_bare = _row(likely_call)
_after_the_tag = framed(_PYTHON_TAG, None, _row(call))


def _llama(reader: Reader, out: EventSink) -> Steps[None]:
    reader.keep()
    yield from reader.word(WHITE, TRIM_MAX)
    outcome = yield from _bare(reader, out)
    if not out.settle(reader) and outcome is CallOutcome.BROKEN:
        yield from reader.rest(drop)
    yield from _after_the_tag(reader, out)


LLAMA3 = ToolFormat(
    names=("llama3",),
    example=(
        '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}'
    ),
    read=_llama,
    marks=(_PYTHON_TAG,),
    special=True,
)

# A name before its JSON arguments.

_WORD = re.compile(r"[^<`{\n]*")
_ID = re.compile(r"[^<{\n]*")
_NAME = re.compile(r"[\w.\-]*")


def _named_call(reader: Reader, out: EventSink, name: str) -> Steps[CallOutcome]:
    yield from reader.space()
    if not name or (yield from reader.peek()) != "{":
        return CallOutcome.NOTHING
    sound = yield from json_text.value(reader, out.begin(reader, name))
    out.end(reader, complete=sound)
    return CallOutcome.DONE if sound else CallOutcome.BROKEN


# DeepSeek V3, R1 and V3.1.

_CALL_BEGIN, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_CALLS_BEGIN, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"


def _v3(reader: Reader, out: EventSink) -> Steps[CallOutcome]:
    """Read the kind of call, always a function, then the name and a fenced block of JSON."""
    yield from reader.word(_WORD, NAME_MAX)
    if not (yield from reader.starts(_SEPARATOR)):
        return CallOutcome.NOTHING
    name = (yield from reader.word(_WORD, NAME_MAX)).strip()
    yield from reader.space()
    yield from reader.starts("```json", "```\n")
    return (yield from _named_call(reader, out, name))


def _v31(reader: Reader, out: EventSink) -> Steps[CallOutcome]:
    name = (yield from reader.word(_WORD, NAME_MAX)).strip()
    if not (yield from reader.starts(_SEPARATOR)):
        return CallOutcome.NOTHING
    return (yield from _named_call(reader, out, name))


def _deepseek_form(before: str, middle: str, after: str) -> CallGrammar:
    """A grammar form of one call in a section of its own."""
    return CallGrammar(
        trigger=_CALLS_BEGIN,
        begin=f"{_CALLS_BEGIN}{_CALL_BEGIN}{before}",
        middle=middle,
        end=f"{after}{_CALL_END}{_CALLS_END}",
        marks=(_CALLS_BEGIN, _CALL_BEGIN, _SEPARATOR, _CALL_END, _CALLS_END),
        excludes=(_CALL_BEGIN,),
    )


DEEPSEEK_V3 = framed_format(
    ("deepseekv3",),
    _CALL_BEGIN,
    _CALL_END,
    _v3,
    section=(_CALLS_BEGIN, _CALLS_END),
    example=(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    form=_deepseek_form(f"function{_SEPARATOR}", "\n```json\n", "\n```"),
)
DEEPSEEK_V31 = framed_format(
    ("deepseekv31",),
    _CALL_BEGIN,
    _CALL_END,
    _v31,
    section=(_CALLS_BEGIN, _CALLS_END),
    example=(
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>"
    ),
    form=_deepseek_form("", _SEPARATOR, ""),
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
    name = re.sub(r":\d+$", "", id_).removeprefix("functions.")
    return (yield from _named_call(reader, out, name))


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
        return (yield from calls(reader, out))
    name = yield from reader.word(_NAME, NAME_MAX)
    if (yield from reader.starts("[CALL_ID]", "[ARGS]")) == "[CALL_ID]":
        yield from reader.word(_NAME, NAME_MAX)
        yield from reader.starts("[ARGS]")
    return (yield from _named_call(reader, out, name))


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
    after("[", _apertus),
    example='<|tools_prefix|>[{"f": {"a": 1}}]<|tools_suffix|>',
)
