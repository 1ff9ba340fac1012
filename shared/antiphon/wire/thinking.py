"""How an answer marks its thinking: the detokenizer counts the tokens between."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from antiphon.wire.base import Value

Mark = Annotated[str, Meta(min_length=1, max_length=128)]
MARKS_MAX = 16
SPACE_MAX = 16
"""Most white space before thinking at the beginning of an answer."""


class ThinkingMarks(Value):
    """Marks of thinking in the text of an answer.

    The tokens of thinking are those from its first mark to its last, with both.

    Attributes:
        begin: The mark before it.
        end: The mark after it.
        cuts: Marks of something else, which end it too, and are no part of it.
        inside: The answer begins as thinking: its first mark stands in the prompt.
        again: It may come anywhere and more than once; else only at the beginning of an answer.
    """

    begin: Mark
    end: Mark
    cuts: Annotated[tuple[Mark, ...], Meta(max_length=MARKS_MAX)] = ()
    inside: bool = False
    again: bool = False
