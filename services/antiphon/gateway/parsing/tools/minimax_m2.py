"""MiniMax M2: invocations with an element per parameter."""

from __future__ import annotations

from antiphon.gateway.parsing.tools.format import CallGrammar, ToolFormat, framed
from antiphon.gateway.parsing.tools.tags import Tags, tagged

_BEGIN, _END = "<minimax:tool_call>", "</minimax:tool_call>"
_TAGS = Tags(
    call=('<invoke name="', '">'),
    call_end="</invoke>",
    argument_begin='<parameter name="',
    argument=(('">', None),),
    argument_end="</parameter>",
    end=_END,
)

FORMAT = ToolFormat(
    names=("minimax-m2",),
    example=(
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1</parameter>\n</invoke>\n'
        "</minimax:tool_call>"
    ),
    read=framed(_BEGIN, _END, tagged(_TAGS)),
    marks=(_BEGIN,),
    special=True,
    form=CallGrammar(
        trigger=_BEGIN,
        begin=f'{_BEGIN}\n<invoke name="',
        middle='">\n',
        end=f"</invoke>\n{_END}",
        separator="\n",
        style="minimax_xml",
        marks=(_BEGIN, _END),
    ),
)
