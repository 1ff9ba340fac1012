"""Cohere Command: tokens around reasoning, and others around the answer."""

from __future__ import annotations

from antiphon.gateway.parsing.reasoning.format import ReasoningFormat
from antiphon.gateway.parsing.tools.cohere_command4 import AROUND

FORMAT = ReasoningFormat(
    names=("cohere_command4",),
    begin="<|START_THINKING|>",
    end="<|END_THINKING|>",
    special=True,
    around=AROUND,
)
