"""Apertus: special tokens around reasoning."""

from __future__ import annotations

from antiphon.gateway.parsing.reasoning.format import ReasoningFormat

FORMAT = ReasoningFormat(
    names=("apertus2509",), begin="<|inner_prefix|>", end="<|inner_suffix|>", special=True
)
