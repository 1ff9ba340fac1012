"""Mistral: a list of JSON objects, or a name and JSON, after a delimiter."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from antiphon.gateway.parsing.json_text import NAME_MAX
from antiphon.gateway.parsing.tools import objects
from antiphon.gateway.parsing.tools.deepseek import call
from antiphon.gateway.parsing.tools.format import CallOutcome, ToolFormat, framed, short_id

if TYPE_CHECKING:
    from antiphon.gateway.parsing.event_sink import EventSink
    from antiphon.gateway.parsing.reader import Reader, Steps

_BEGIN = "[TOOL_CALLS]"
_NAME = re.compile(r"[\w.\-]*")


def _body(reader: Reader, out: EventSink) -> Steps[CallOutcome]:
    yield from reader.space()
    if (yield from reader.peek()) in {"[", "{"}:
        return (yield from objects.calls(reader, out))
    name = yield from reader.word(_NAME, NAME_MAX)
    if (yield from reader.starts("[CALL_ID]", "[ARGS]")) == "[CALL_ID]":
        yield from reader.word(_NAME, NAME_MAX)
        yield from reader.starts("[ARGS]")
    return (yield from call(reader, out, name))


FORMAT = ToolFormat(
    names=("mistral",),
    example='[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]\n[TOOL_CALLS]f[ARGS]{"a": 1}',
    read=framed(_BEGIN, None, _body),
    marks=(_BEGIN,),
    special=True,
    call_id=short_id,  # its templates reject longer ids in the next turn
)
