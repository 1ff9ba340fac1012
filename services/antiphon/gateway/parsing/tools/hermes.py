"""Hermes, Qwen and Trinity: JSON objects between tags."""

from __future__ import annotations

from antiphon.gateway.parsing.tools import objects
from antiphon.gateway.parsing.tools.format import CallGrammar, ToolFormat, framed

_BEGIN = "<tool_call>"
_END = "</tool_call>"

FORMAT = ToolFormat(
    names=("hermes", "qwen", "qwen25", "trinity"),
    example='<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
    read=framed(_BEGIN, _END, objects.call),
    marks=(_BEGIN,),
    form=CallGrammar(
        trigger=_BEGIN,
        begin='<tool_call>\n{"name": "',
        middle='", "arguments": ',
        end="}\n</tool_call>",
        separator="\n",
    ),
)
