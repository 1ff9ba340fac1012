"""Grammars that constrain output: JSON schema, regular expression, EBNF, structural tags."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from antiphon.wire.base import Value
from antiphon.wire.processors import TokenId

GRAMMAR_TEXT_MAX = 131_072
"""Maximum length of a grammar, in characters: schemas of hundreds of tools fit."""


class GrammarKind(StrEnum):
    """Language of a grammar's text."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    """Any JSON object; the text is empty."""
    REGEX = "regex"
    EBNF = "ebnf"
    """Rules like `root ::= "a" | "b" root`; the output matches `root`."""
    STRUCTURAL_TAG = "structural_tag"
    """Free text with tags whose content has grammars of its own; as JSON."""


class Grammar(Value):
    """The output, or what follows its reasoning, matches this grammar.

    When the match is complete and cannot continue, the choice ends with finish reason `stop`.

    Attributes:
        begins_after: Output ids after which the grammar applies, such as a model's end of
            reasoning; before them nothing is masked. Empty: it applies from the first token.
    """

    kind: GrammarKind
    text: Annotated[str, Meta(max_length=GRAMMAR_TEXT_MAX)] = ""
    begins_after: Annotated[tuple[TokenId, ...], Meta(max_length=64)] = ()
