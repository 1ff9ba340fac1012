"""Python calls in a list: Llama 4, Olmo and LFM2."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from antiphon.gateway.parsing.json_text import NAME_MAX
from antiphon.gateway.parsing.python_text import literal
from antiphon.gateway.parsing.reader import AFTER_CALLS, TRIM_MAX, Reader, Steps, drop
from antiphon.gateway.parsing.tools import objects
from antiphon.gateway.parsing.tools.format import CallOutcome, ToolFormat, framed
from antiphon.gateway.parsing.tools.values import quoted

if TYPE_CHECKING:
    from antiphon.gateway.parsing.event_sink import EventSink
    from antiphon.gateway.parsing.reader import Emit

_NAME = re.compile(r"[\w.\-]*")
_KEY = re.compile(r"\w*")
_WHITE = re.compile(r"[ \t\r\n]*")


def _calls(reader: Reader, out: EventSink) -> Steps[CallOutcome]:
    """Read calls up to the closing bracket, after the opening one."""
    outcome = CallOutcome.NOTHING
    while True:
        yield from reader.space()
        if (yield from reader.starts("]")):
            return outcome
        name = yield from reader.word(_NAME, NAME_MAX)
        if not name or not (yield from reader.starts("(")):
            return CallOutcome.BROKEN if outcome is CallOutcome.DONE else CallOutcome.NOTHING
        complete = yield from _arguments(reader, out.begin(reader, name))
        out.end(reader, complete=complete)
        if not complete:
            return CallOutcome.BROKEN
        outcome = CallOutcome.DONE
        yield from reader.space()
        yield from reader.starts(",")


def _arguments(reader: Reader, emit: Emit) -> Steps[bool]:
    emit("{")
    between = ""
    while True:
        yield from reader.space()
        if (yield from reader.starts(")")):
            emit("}")
            return True
        key = yield from reader.word(_KEY, NAME_MAX)
        yield from reader.space()
        if not key or not (yield from reader.starts("=")):
            return False
        emit(f"{between}{quoted(key)}: ")
        between = ", "
        yield from reader.space()
        if not (yield from literal(reader, emit)):
            return False
        yield from reader.space()
        if not (yield from reader.starts(",")) and (yield from reader.peek()) != ")":
            return False


def _read(reader: Reader, out: EventSink) -> Steps[None]:
    reader.keep()
    yield from reader.word(_WHITE, TRIM_MAX)
    framed_ = yield from reader.starts("<|python_start|>")
    listed = yield from reader.starts("[")
    outcome = CallOutcome.NOTHING
    if listed:
        outcome = yield from _calls(reader, out)
    if framed_ and outcome is CallOutcome.DONE:
        yield from reader.space()
        yield from reader.starts("<|python_end|>")
    if out.settle(reader):
        yield from reader.rest(out.content)
    elif outcome is CallOutcome.DONE:
        yield from reader.until(AFTER_CALLS, out.content)
    else:
        yield from reader.rest(drop)


def _lfm2(reader: Reader, out: EventSink) -> Steps[CallOutcome]:
    yield from reader.space()
    if not (yield from reader.starts("[")):
        return CallOutcome.NOTHING
    yield from reader.space()
    if (yield from reader.peek()) == "{":
        return (yield from objects.calls_in_list(reader, out))
    return (yield from _calls(reader, out))


PYTHONIC = ToolFormat(
    names=("pythonic",),
    example='[f(a=1), g(b="x")]',
    read=_read,
    special=True,
)
_LFM2_BEGIN, _LFM2_END = "<|tool_call_start|>", "<|tool_call_end|>"
LFM2 = ToolFormat(
    names=("lfm2",),
    example="<|tool_call_start|>[f(a=1)]<|tool_call_end|>",
    read=framed(_LFM2_BEGIN, _LFM2_END, _lfm2),
    marks=(_LFM2_BEGIN,),
    special=True,
)
