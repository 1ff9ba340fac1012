"""Qwen3-Coder and similar formats: elements for the function and each parameter."""

from __future__ import annotations

from antiphon.gateway.parsing.tools.format import CallGrammar, ToolFormat, framed
from antiphon.gateway.parsing.tools.tags import Tags, tagged

_BEGIN, _END = "<tool_call>", "</tool_call>"
_TAGS = Tags(
    call=("<function=", ">"),
    call_end="</function>",
    argument_begin="<parameter=",
    argument=((">", None),),
    argument_end="</parameter>",
    end=_END,
)

FORMAT = ToolFormat(
    names=("qwen3_coder", "mimo", "nanbeige", "step3p5"),
    example=(
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    ),
    read=framed(_BEGIN, _END, tagged(_TAGS)),
    marks=(_BEGIN,),
    form=CallGrammar(
        trigger="<tool_call>\n<function=",
        begin="<tool_call>\n<function=",
        middle=">\n",
        end="\n</function>\n</tool_call>",
        separator="\n",
        style="qwen_xml",
    ),
)
