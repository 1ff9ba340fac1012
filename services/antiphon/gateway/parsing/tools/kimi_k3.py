"""Kimi K3: blocks that start and end with a name between tokens; so do calls and arguments."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from antiphon.gateway.parsing.json_text import NAME_MAX
from antiphon.gateway.parsing.reader import Emit, Marks, Reader, Steps
from antiphon.gateway.parsing.tools.format import CallOutcome, framed_format, repeated
from antiphon.gateway.parsing.tools.values import ArgumentsWriter

if TYPE_CHECKING:
    from antiphon.gateway.parsing.events import EventSink
    from antiphon.wire.schemas import Json

_BEGIN, _END = "<|open|>tools<|sep|>", "<|close|>tools<|sep|>"
_CALL_END = "<|close|>call<|sep|>"
_ARGUMENT = '<|open|>argument key="'
_SEP = '"<|sep|>'
AROUND = ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>")
"""Delimiters around text, and at the end of a message."""

_QUOTED = re.compile(r'[^"<]*')
_VALUE_END = Marks("<|close|>argument<|sep|>")


def _call(reader: Reader, out: EventSink) -> Steps[CallOutcome]:
    name = yield from reader.word(_QUOTED, NAME_MAX)
    if not name or not (yield from _attribute(reader, '" index="')):
        return CallOutcome.NOTHING
    complete = yield from _arguments(reader, out.begin(reader, name), out.schema(name))
    out.end(reader, complete=complete)
    return CallOutcome.DONE if complete else CallOutcome.BROKEN


def _attribute(reader: Reader, before: str) -> Steps[str]:
    """Read the last attribute of a block and the end of its header; empty if it is missing."""
    if not (yield from reader.starts(before)):
        return ""
    value = yield from reader.word(_QUOTED, NAME_MAX)
    return value if (yield from reader.starts(_SEP)) else ""


def _arguments(reader: Reader, emit: Emit, schema: Json) -> Steps[bool]:
    written = ArgumentsWriter(schema, emit)
    while True:
        yield from reader.space()
        mark = yield from reader.starts(_ARGUMENT, _CALL_END)
        if mark == _CALL_END:
            written.close()
            return True
        key = yield from reader.word(_QUOTED, NAME_MAX)
        kind = yield from _attribute(reader, '" type="')
        if mark is None or not kind:
            return False
        if not (yield from written.value(reader, key, _VALUE_END, text=kind == "string")):
            return False


KIMI_K3 = framed_format(
    ("kimi_k3",),
    _BEGIN,
    _END,
    repeated('<|open|>call tool="', _END, _call),
    example=(
        '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
        '<|open|>argument key="a" type="integer"<|sep|>1<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>"
    ),
    around=AROUND,
    call_id=lambda name, number: f"{name}:{number}",
)
