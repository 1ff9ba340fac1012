"""Kimi's first reasoning models: delimiters of their own, in plain text."""

from __future__ import annotations

from antiphon.gateway.parsing.reasoning.format import ReasoningFormat

FORMAT = ReasoningFormat(names=("kimi",), begin="◁think▷", end="◁/think▷")
