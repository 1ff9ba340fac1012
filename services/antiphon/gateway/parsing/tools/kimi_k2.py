"""Kimi K2: an id that contains the name, and JSON."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from antiphon.gateway.parsing.json_text import NAME_MAX
from antiphon.gateway.parsing.tools.deepseek import call
from antiphon.gateway.parsing.tools.format import CallGrammar, CallOutcome, ToolFormat, framed

if TYPE_CHECKING:
    from antiphon.gateway.parsing.event_sink import EventSink
    from antiphon.gateway.parsing.reader import Reader, Steps

_BEGIN, _END = "<|tool_call_begin|>", "<|tool_call_end|>"
_ALL_BEGIN, _ALL_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_ID = re.compile(r"[^<{\n]*")


def _body(reader: Reader, out: EventSink) -> Steps[CallOutcome]:
    yield from reader.space()
    id_ = (yield from reader.word(_ID, NAME_MAX)).strip()
    if not (yield from reader.starts("<|tool_call_argument_begin|>")):
        return CallOutcome.NOTHING
    return (yield from call(reader, out, re.sub(r":\d+$", "", id_).removeprefix("functions.")))


def _id(name: str, number: int) -> str:
    """The id that the model's template uses: calls are counted over the whole conversation."""
    return f"functions.{name}:{number}"


FORMAT = ToolFormat(
    names=("kimi_k2",),
    example=(
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
        '<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_calls_section_end|>'
    ),
    read=framed(_BEGIN, _END, _body, section=(_ALL_BEGIN, _ALL_END)),
    marks=(_ALL_BEGIN, _BEGIN),
    special=True,
    form=CallGrammar(
        trigger=_ALL_BEGIN,
        begin=f"{_ALL_BEGIN}{_BEGIN}functions.",
        middle=":0<|tool_call_argument_begin|>",
        end=f"{_END}{_ALL_END}",
        marks=(_ALL_BEGIN, _BEGIN, "<|tool_call_argument_begin|>", _END, _ALL_END),
        excludes=(_BEGIN,),
    ),
    call_id=_id,
)
