"""Step 3: invocations in DeepSeek's frame, with other characters."""

# ruff: noqa: RUF001  # these bars are the letters of the marks

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.gateway.parsing.tools.format import CallOutcome, ToolFormat, framed
from antiphon.gateway.parsing.tools.tags import Tags, tagged

if TYPE_CHECKING:
    from antiphon.gateway.parsing.event_sink import EventSink
    from antiphon.gateway.parsing.reader import Reader, Steps

_BEGIN, _END = "<｜tool_call_begin｜>", "<｜tool_call_end｜>"
_ALL_BEGIN, _ALL_END = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
_CALL = tagged(
    Tags(
        call=('<steptml:invoke name="', '">'),
        call_end="</steptml:invoke>",
        argument_begin='<steptml:parameter name="',
        argument=(('">', None),),
        argument_end="</steptml:parameter>",
        end=_END,
    )
)


def _body(reader: Reader, out: EventSink) -> Steps[CallOutcome]:
    yield from reader.space()
    if not (yield from reader.starts("function<｜tool_sep｜>")):
        return CallOutcome.NOTHING
    return (yield from _CALL(reader, out))


FORMAT = ToolFormat(
    names=("step3",),
    example=(
        '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="f">'
        '<steptml:parameter name="a">1</steptml:parameter></steptml:invoke><｜tool_call_end｜>'
        "<｜tool_calls_end｜>"
    ),
    read=framed(_BEGIN, _END, _body, section=(_ALL_BEGIN, _ALL_END)),
    marks=(_ALL_BEGIN, _BEGIN),
    special=True,
)
