"""MiniMax M3: delimiters of its own."""

from __future__ import annotations

from antiphon.gateway.parsing.reasoning.format import ReasoningFormat

FORMAT = ReasoningFormat(names=("minimax-m3",), begin="<mm:think>", end="</mm:think>")
