"""What a scripted model writes, in the form of the embedded one."""

from __future__ import annotations

import json


def thinking_call(name: str, arguments: dict[str, object]) -> str:
    """Write an answer that thinks and then calls a tool."""
    return f"<think>A tool will say.</think>{call(name, arguments)}"


def call(name: str, arguments: dict[str, object]) -> str:
    """Write an answer that calls a tool."""
    written = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{written}\n</tool_call>"
