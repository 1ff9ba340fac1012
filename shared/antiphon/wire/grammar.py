"""The form that an answer must have: a JSON schema, a regular expression, a grammar, or tags."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from antiphon.wire.base import Value
from antiphon.wire.processors import TokenId

GRAMMAR_TEXT_MAX = 131_072
"""Longest text of a grammar, in characters: schemas of hundreds of tools fit."""


class GrammarKind(StrEnum):
    """What the text of a grammar is written in."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    """Any JSON object. There is no text."""
    REGEX = "regex"
    EBNF = "ebnf"
    """Rules like `root ::= "a" | "b" root`; the answer is a `root`."""
    STRUCTURAL_TAG = "structural_tag"
    """Free text with tags inside whose content has a form of its own; a JSON text."""


class Grammar(Value):
    """The answer, or what follows its thinking, is a sentence of this grammar.

    When the sentence is complete and cannot go on, the choice ends as by a stop.

    Attributes:
        begins_after: Ids of the answer after which the grammar begins, as a model's end of
            thinking; empty: it begins with the answer. Until they came nothing is forbidden.
    """

    kind: GrammarKind
    text: Annotated[str, Meta(max_length=GRAMMAR_TEXT_MAX)] = ""
    begins_after: Annotated[tuple[TokenId, ...], Meta(max_length=64)] = ()
