"""Reasoning between `<think>` and `</think>`, the format of most models."""

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
    names=("deepseek-v3", "deepseek-v4", "kimi_k2"), begin=_BEGIN, end=_END, switch="thinking"
)
MARKED = ReasoningFormat(
    names=(
        "deepseek-v41",
        "dots",
        "gigachat35",
        "granite_thinking_parser",
        "hunyuan",
        "iquest_q1",
        "ling3",
        "nanbeige",
        "poolside_v1",
    ),
    begin=_BEGIN,
    end=_END,
)
APPENDED = ReasoningFormat(
    names=("minimax-append-think",), begin=_BEGIN, end=_END, inside=True, shown=True
)
"""The reasoning is sent back as part of the answer, since the model expects it so."""
