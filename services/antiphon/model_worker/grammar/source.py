"""A grammar as it is compiled: checked, and written one way."""

from __future__ import annotations

import msgspec

from antiphon.model_worker.grammar.schema import PATTERN_MAX, hold, read_json
from antiphon.model_worker.grammar.tags import RULES_MAX, read_tags
from antiphon.wire.errors import InvalidRequest
from antiphon.wire.grammar import GRAMMAR_TEXT_MAX, Grammar, GrammarKind

_CHARACTERS_MAX = {
    GrammarKind.JSON_SCHEMA: GRAMMAR_TEXT_MAX,
    GrammarKind.JSON_OBJECT: 0,
    GrammarKind.REGEX: PATTERN_MAX,
    GrammarKind.EBNF: RULES_MAX,
    GrammarKind.STRUCTURAL_TAG: GRAMMAR_TEXT_MAX,
}
_ANY_OBJECT = '{"type": "object"}'


class Source(msgspec.Struct, frozen=True):
    """What is compiled. Two requests with the same one share the result."""

    kind: GrammarKind
    text: str


def source_of(grammar: Grammar | Source, whitespace_max: int) -> Source:
    """Check a grammar without compiling it.

    Raises:
        InvalidRequest: It is empty, too long, or holds what the compiler would not hold.
    """
    kind, text = grammar.kind, grammar.text
    if kind is GrammarKind.JSON_OBJECT and not text:
        return Source(GrammarKind.JSON_SCHEMA, _ANY_OBJECT)
    if len(text) > _CHARACTERS_MAX[kind]:
        message = f"grammar: {kind} takes at most {_CHARACTERS_MAX[kind]} characters"
        raise InvalidRequest(message, param="grammar")
    if not text:
        raise InvalidRequest("grammar: the text is empty", param="grammar")
    if "\0" in text:  # the compiler reads beyond it
        raise InvalidRequest("grammar: the text holds a NUL character", param="grammar")
    if kind is GrammarKind.JSON_SCHEMA:
        schema = read_json(text)
        hold(schema)
        return Source(kind, msgspec.json.encode(schema).decode())
    if kind is GrammarKind.STRUCTURAL_TAG:
        tags = read_tags(text, whitespace_max)
        return Source(kind, msgspec.json.encode(tags).decode())
    return Source(kind, text)
