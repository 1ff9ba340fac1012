"""Dots: invocations with an element per parameter."""

from __future__ import annotations

from antiphon.gateway.parsing.tools.format import ToolFormat, framed
from antiphon.gateway.parsing.tools.tags import Tags, tagged

_BEGIN, _END = "<dots_function_call>", "</dots_function_call>"
_TAGS = Tags(
    call=('<invoke name="', '">'),
    call_end="</invoke>",
    argument_begin='<parameter name="',
    argument=(('">', None),),
    argument_end="</parameter>",
    end=_END,
)

FORMAT = ToolFormat(
    names=("dots",),
    example=(
        '<dots_function_call>\n<invoke name="f">\n<parameter name="a">1</parameter>\n</invoke>\n'
        "</dots_function_call>"
    ),
    read=framed(_BEGIN, _END, tagged(_TAGS)),
    marks=(_BEGIN,),
    special=True,
)
