"""Mistral's reasoning models: special tokens, and only where `reasoning_effort` asks for it."""

from __future__ import annotations

from antiphon.gateway.parsing.reasoning.format import ReasoningFormat

FORMAT = ReasoningFormat(names=("mistral",), begin="[THINK]", end="[/THINK]", special=True)
