"""MiniCPM: an element per call, with an element per parameter."""

from __future__ import annotations

from antiphon.gateway.parsing.tools.format import ToolFormat, framed
from antiphon.gateway.parsing.tools.tags import Tags, tagged

_BEGIN = '<function name="'
_TAGS = Tags(
    call=("", '">'),
    call_end="</function>",
    argument_begin='<param name="',
    argument=(('">', None),),
    argument_end="</param>",
    end=None,
)

FORMAT = ToolFormat(
    names=("minicpm5",),
    example='<function name="f"><param name="a">1</param></function>',
    read=framed(_BEGIN, None, tagged(_TAGS)),
    marks=(_BEGIN,),
    special=True,
)
