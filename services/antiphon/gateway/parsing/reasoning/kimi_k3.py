"""Kimi K3: reasoning is a block, and so is the answer."""

from __future__ import annotations

from antiphon.gateway.parsing.reasoning.format import ReasoningFormat
from antiphon.gateway.parsing.tools.kimi_k3 import AROUND

FORMAT = ReasoningFormat(
    names=("kimi_k3",),
    begin="<|open|>think<|sep|>",
    end="<|close|>think<|sep|>",
    special=True,
    around=AROUND,
)
