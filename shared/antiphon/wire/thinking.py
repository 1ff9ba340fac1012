"""Reasoning marks in the output: the detokenizer counts the tokens between them."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from antiphon.wire.base import Value

Mark = Annotated[str, Meta(min_length=1, max_length=128)]
MARKS_MAX = 16
SPACE_MAX = 16
"""Maximum white space before reasoning at the start of the output."""


class ThinkingMarks(Value):
    """Marks of reasoning in the text of a choice.

    Reasoning tokens are those from the first mark to the last, both included.

    Attributes:
        begin: The mark before reasoning.
        end: The mark after reasoning.
        cuts: Other marks that end reasoning without being part of it.
        inside: The output begins as reasoning: its first mark is in the prompt.
        again: Reasoning may occur anywhere and repeatedly; else only at the start of the output.
    """

    begin: Mark
    end: Mark
    cuts: Annotated[tuple[Mark, ...], Meta(max_length=MARKS_MAX)] = ()
    inside: bool = False
    again: bool = False
