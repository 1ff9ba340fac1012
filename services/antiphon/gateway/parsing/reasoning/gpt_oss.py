"""Harmony, which gpt-oss writes: thinking is a channel, and its calls are others."""

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
