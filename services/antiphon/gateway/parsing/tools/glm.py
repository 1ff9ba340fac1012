"""GLM and Hunyuan: a name, then keys and values in elements."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from antiphon.gateway.parsing.json_text import NAME_MAX
from antiphon.gateway.parsing.reader import Emit, Marks, Reader, Steps
from antiphon.gateway.parsing.tools.format import (
    Body,
    CallGrammar,
    CallOutcome,
    ToolFormat,
    framed_format,
)
from antiphon.gateway.parsing.tools.values import ArgumentsWriter

if TYPE_CHECKING:
    from antiphon.gateway.parsing.events import EventSink
    from antiphon.wire.schemas import Json

_NAME = re.compile(r"[^<\n]*")
_VALUE_END = Marks("</arg_value>")
_ELEMENTS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


def _elements(end: str, *, after_name: str | None = None) -> Body:
    """Create a reader of a name, maybe `after_name`, then keys and values, up to the delimiter."""

    def body(reader: Reader, out: EventSink) -> Steps[CallOutcome]:
        yield from reader.space()
        name = (yield from reader.word(_NAME, NAME_MAX)).strip()
        yield from reader.space()
        if after_name and (yield from reader.starts(after_name)):
            yield from reader.space()
        # A name alone could be any text: it is a call if an argument or the end comes next.
        mark = yield from reader.starts("<arg_key>", end)
        if not name or mark is None:
            return CallOutcome.NOTHING
        emit = out.begin(reader, name)
        complete = yield from _arguments(reader, emit, out.schema(name), mark, end)
        out.end(reader, complete=complete)
        return CallOutcome.ENDED if complete else CallOutcome.BROKEN

    return body


def _arguments(reader: Reader, emit: Emit, schema: Json, mark: str | None, end: str) -> Steps[bool]:
    written = ArgumentsWriter(schema, emit)
    while mark == "<arg_key>":
        key = (yield from reader.word(_NAME, NAME_MAX)).strip()
        if not (yield from reader.starts("</arg_key>")):
            return False
        yield from reader.space()
        if not (yield from reader.starts("<arg_value>")):
            return False
        if not (yield from written.value(reader, key, _VALUE_END)):
            return False
        yield from reader.space()
        mark = yield from reader.starts("<arg_key>", end)
    if mark is None:
        return False
    written.close()
    return True


def _format(names: tuple[str, ...], begin: str, end: str) -> ToolFormat:
    return framed_format(
        names,
        begin,
        end,
        _elements(end),
        example=f"{begin}f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n{end}",
        form=CallGrammar(
            trigger=begin,
            begin=begin,
            middle="\n",
            end=end,
            style="glm_xml",
            marks=(begin, end, *_ELEMENTS),
        ),
    )


GLM = _format(
    ("glm45", "glm", "glm47", "ling3", "poolside_v1", "spark25"), "<tool_call>", "</tool_call>"
)
IQUEST = _format(("iquest_q1",), "<iquest_tool_call>", "</iquest_tool_call>")
HUNYUAN = framed_format(
    ("hunyuan",),
    "<tool_call>",
    "</tool_call>",
    _elements("</tool_call>", after_name="<tool_sep>"),
    section=("<tool_calls>", "</tool_calls>"),
    example=(
        "<tool_calls>\n<tool_call>f<tool_sep>\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
        "</tool_call>\n</tool_calls>"
    ),
)
