"""InternLM and Intern-S1: a JSON object between two tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.gateway.parsing.tools import objects
from antiphon.gateway.parsing.tools.format import CallOutcome, ToolFormat, framed

if TYPE_CHECKING:
    from antiphon.gateway.parsing.event_sink import EventSink
    from antiphon.gateway.parsing.reader import Reader, Steps

_BEGIN, _END = "<|action_start|>", "<|action_end|>"


def _body(reader: Reader, out: EventSink) -> Steps[CallOutcome]:
    yield from reader.space()
    if not (yield from reader.starts("<|plugin|>")):
        return CallOutcome.NOTHING
    return (yield from objects.call(reader, out))


FORMAT = ToolFormat(
    names=("interns1",),
    example='<|action_start|> <|plugin|>\n{"name": "f", "parameters": {"a": 1}}<|action_end|>',
    read=framed(_BEGIN, _END, _body),
    marks=(_BEGIN,),
    special=True,
)
