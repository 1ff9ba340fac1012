"""Thinking between `<think>` and `</think>`, which most models write."""

from __future__ import annotations

from antiphon.gateway.parsing.reasoning.format import ReasoningFormat

_BEGIN, _END = "<think>", "</think>"

QWEN3 = ReasoningFormat(names=("qwen3", "glm45"), begin=_BEGIN, end=_END, switch="enable_thinking")
DEEPSEEK_R1 = ReasoningFormat(
    names=("deepseek-r1", "qwen3-thinking"), begin=_BEGIN, end=_END, inside=True
)
