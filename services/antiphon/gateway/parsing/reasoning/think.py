"""Thinking between `<think>` and `</think>`, which most models write."""

from __future__ import annotations

from antiphon.gateway.parsing.reasoning.format import ReasoningFormat

_BEGIN, _END = "<think>", "</think>"

ALWAYS = ReasoningFormat(
    names=("deepseek-r1", "qwen3-thinking", "minimax", "step3", "step3p5"),
    begin=_BEGIN,
    end=_END,
    inside=True,
)
SWITCHED = ReasoningFormat(
    names=("qwen3", "glm45", "interns1", "mimo", "nemotron_3"),
    begin=_BEGIN,
    end=_END,
    switch="enable_thinking",
)
ASKED = ReasoningFormat(
    names=("deepseek-v3", "deepseek-v4"), begin=_BEGIN, end=_END, switch="thinking", on=False
)
KIMI_K2 = ReasoningFormat(names=("kimi_k2",), begin=_BEGIN, end=_END, switch="thinking")
