"""Apertus: a list of objects with one key each, the tool name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.gateway.parsing import json_text
from antiphon.gateway.parsing.tools.format import CallOutcome, ToolFormat, framed

if TYPE_CHECKING:
    from antiphon.gateway.parsing.event_sink import EventSink
    from antiphon.gateway.parsing.reader import Reader, Steps

_BEGIN, _END = "<|tools_prefix|>", "<|tools_suffix|>"


def _body(reader: Reader, out: EventSink) -> Steps[CallOutcome]:
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


FORMAT = ToolFormat(
    names=("apertus2509",),
    example='<|tools_prefix|>[{"f": {"a": 1}}]<|tools_suffix|>',
    read=framed(_BEGIN, _END, _body),
    marks=(_BEGIN,),
    special=True,
)
