"""Llama 3: JSON objects after a token, or as the whole output."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from antiphon.gateway.parsing.reader import TRIM_MAX, Reader, Steps, drop
from antiphon.gateway.parsing.tools import objects
from antiphon.gateway.parsing.tools.format import Body, CallOutcome, ToolFormat, framed

if TYPE_CHECKING:
    from antiphon.gateway.parsing.event_sink import EventSink

_BEGIN = "<|python_tag|>"
_WHITE = re.compile(r"[ \t\r\n]*")


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
            outcome = yield from _next(reader, out)
        return outcome

    return body


def _next(reader: Reader, out: EventSink) -> Steps[CallOutcome]:
    """Read a further call; anything else ends the row."""
    outcome = yield from objects.call(reader, out)
    return CallOutcome.BROKEN if outcome is CallOutcome.NOTHING else outcome


_bare = _row(objects.likely_call)
_after_the_tag = framed(_BEGIN, None, _row(objects.call))


def _read(reader: Reader, out: EventSink) -> Steps[None]:
    reader.keep()
    yield from reader.word(_WHITE, TRIM_MAX)
    outcome = yield from _bare(reader, out)
    if not out.settle(reader) and outcome is CallOutcome.BROKEN:
        yield from reader.rest(drop)
    yield from _after_the_tag(reader, out)


FORMAT = ToolFormat(
    names=("llama3",),
    example=(
        '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}'
    ),
    read=_read,
    marks=(_BEGIN,),
    special=True,
)
