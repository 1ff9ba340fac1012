"""A grammar as it is compiled: checked and normalised."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.model_worker.grammar.schema import PATTERN_MAX, prepare_schema, read_json
from antiphon.model_worker.grammar.structural_tags import RULES_MAX, parse_structural_tag
from antiphon.wire.errors import InvalidRequest
from antiphon.wire.grammar import GRAMMAR_TEXT_MAX, Grammar, GrammarKind

if TYPE_CHECKING:
    from antiphon.wire.schemas import Json

_CHARACTERS_MAX = {
    GrammarKind.JSON_SCHEMA: GRAMMAR_TEXT_MAX,
    GrammarKind.JSON_OBJECT: 0,
    GrammarKind.REGEX: PATTERN_MAX,
    GrammarKind.EBNF: RULES_MAX,
    GrammarKind.STRUCTURAL_TAG: GRAMMAR_TEXT_MAX,
}
PROPERTIES_MAX = 1000
_ANY_OBJECT = '{"type": "object"}'


class GrammarSource(msgspec.Struct, frozen=True):
    """The compiler's input. Requests with equal sources share the compiled grammar."""

    kind: GrammarKind
    text: str


def source_of(
    grammar: Grammar | GrammarSource, whitespace_max: int, properties_max: int = PROPERTIES_MAX
) -> GrammarSource:
    """Check and normalise a grammar without compiling it.

    Raises:
        InvalidRequest: It is empty, too long, or uses what the compiler cannot enforce.
    """
    kind, text = grammar.kind, grammar.text
    if kind is GrammarKind.JSON_OBJECT and not text:
        return GrammarSource(GrammarKind.JSON_SCHEMA, _ANY_OBJECT)
    if len(text) > _CHARACTERS_MAX[kind]:
        message = f"grammar: {kind} takes at most {_CHARACTERS_MAX[kind]} characters"
        raise InvalidRequest(message, param="grammar")
    if not text:
        raise InvalidRequest("grammar: the text is empty", param="grammar")
    if "\0" in text:  # the compiler would read past it
        raise InvalidRequest("grammar: the text contains a NUL character", param="grammar")
    if kind is GrammarKind.JSON_SCHEMA:
        schema = read_json(text)
        _check_properties(schema, properties_max)
        prepare_schema(schema)
        return GrammarSource(kind, msgspec.json.encode(schema).decode())
    if kind is GrammarKind.STRUCTURAL_TAG:
        _check_properties(read_json(text), properties_max)
        tags = parse_structural_tag(text, whitespace_max)
        return GrammarSource(kind, msgspec.json.encode(tags).decode())
    return GrammarSource(kind, text)


def _check_properties(schema: Json, properties_max: int) -> None:
    """Refuse a schema with too many properties: compile time is quadratic in their number."""
    count, parts = 0, [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, list):
            parts += part
        elif isinstance(part, dict):
            properties = part.get("properties")
            count += len(properties) if isinstance(properties, dict) else 0
            parts += part.values()
    if count > properties_max:
        message = (
            f"grammar: {count} properties, more than {properties_max} (grammar.properties_max)"
        )
        raise InvalidRequest(message, param="grammar")
