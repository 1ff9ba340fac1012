"""Cohere Command: a JSON list of calls between two tokens, and tokens around the answer."""

from __future__ import annotations

from antiphon.gateway.parsing.tools import objects
from antiphon.gateway.parsing.tools.format import ToolFormat, framed

_BEGIN, _END = "<|START_ACTION|>", "<|END_ACTION|>"
AROUND = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
"""Delimiters around text."""

FORMAT = ToolFormat(
    names=("cohere_command4",),
    example=(
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}}]'
        "<|END_ACTION|>"
    ),
    read=framed(_BEGIN, _END, objects.calls, around=AROUND),
    marks=(_BEGIN,),
    special=True,
)
