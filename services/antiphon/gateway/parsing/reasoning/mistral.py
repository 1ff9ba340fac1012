"""Mistral's reasoning models: special tokens, only if `reasoning_effort` requests it."""

from __future__ import annotations

from antiphon.gateway.parsing.reasoning.format import ReasoningFormat

FORMAT = ReasoningFormat(names=("mistral",), begin="[THINK]", end="[/THINK]", special=True)
