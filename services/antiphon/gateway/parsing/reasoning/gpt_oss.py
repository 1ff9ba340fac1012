"""Harmony, the format of gpt-oss: reasoning is a channel, and tool calls are others."""

from __future__ import annotations

from antiphon.gateway.parsing.reasoning.format import ReasoningFormat
from antiphon.gateway.parsing.tools import gpt_oss

FORMAT = ReasoningFormat(
    names=("gpt-oss",),
    begin="<|channel|>analysis<|message|>",
    end="<|end|>",
    special=True,
    cuts=("<|call|>", "<|return|>", "<|start|>", "<|channel|>"),
    channels=gpt_oss.FORMAT,
)
