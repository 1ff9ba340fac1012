"""Hunyuan: a name before a delimiter, then keys and values in elements, as in GLM's format."""

from __future__ import annotations

from antiphon.gateway.parsing.tools.format import ToolFormat, framed
from antiphon.gateway.parsing.tools.glm import elements

_BEGIN, _END = "<tool_call>", "</tool_call>"
_ALL_BEGIN, _ALL_END = "<tool_calls>", "</tool_calls>"

FORMAT = ToolFormat(
    names=("hunyuan",),
    example=(
        "<tool_calls>\n<tool_call>f<tool_sep>\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
        "</tool_call>\n</tool_calls>"
    ),
    read=framed(
        _BEGIN, _END, elements(_END, after_name="<tool_sep>"), section=(_ALL_BEGIN, _ALL_END)
    ),
    marks=(_ALL_BEGIN, _BEGIN),
    special=True,
)
