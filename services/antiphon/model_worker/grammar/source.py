"""A grammar as it is compiled: checked and normalised."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.model_worker.grammar.schema import (
    DEPTH_MAX,
    PATTERN_MAX,
    invalid_grammar,
    prepare_schema,
    read_json,
)
from antiphon.wire.sampling import GRAMMAR_TEXT_MAX, Grammar, GrammarKind

if TYPE_CHECKING:
    from antiphon.wire.schemas import Json

RULES_MAX = 32_768
"""Longest text of rules, for the reason of `PATTERN_MAX`."""
PROPERTIES_MAX = 1000
_CHARACTERS_MAX = {
    GrammarKind.JSON_SCHEMA: GRAMMAR_TEXT_MAX,
    GrammarKind.JSON_OBJECT: 0,
    GrammarKind.REGEX: PATTERN_MAX,
    GrammarKind.EBNF: RULES_MAX,
    GrammarKind.STRUCTURAL_TAG: GRAMMAR_TEXT_MAX,
}
_ANY_OBJECT = '{"type": "object"}'
_OF_TOKENS = frozenset(
    {"token", "exclude_token", "any_tokens", "token_triggered_tags", "token_dispatch"}
)


class GrammarSource(msgspec.Struct, frozen=True):
    """The compiler's input. Requests with equal sources share the compiled grammar."""

    kind: GrammarKind
    text: str


def source_of(
    grammar: Grammar | GrammarSource, whitespace_max: int, properties_max: int = PROPERTIES_MAX
) -> GrammarSource:
    """Check and normalise a grammar without compiling it.

    An `InvalidRequest` if it is empty, too long, or uses what the compiler cannot enforce.
    """
    kind, text = grammar.kind, grammar.text
    if kind is GrammarKind.JSON_OBJECT and not text:
        return GrammarSource(GrammarKind.JSON_SCHEMA, _ANY_OBJECT)
    if len(text) > _CHARACTERS_MAX[kind]:
        raise invalid_grammar(f"{kind} takes at most {_CHARACTERS_MAX[kind]} characters")
    if not text:
        raise invalid_grammar("the text is empty")
    if "\0" in text:  # the compiler would read past it
        raise invalid_grammar("the text contains a NUL character")
    if kind is GrammarKind.JSON_SCHEMA:
        schema = read_json(text)
        _check_properties(schema, properties_max)
        prepare_schema(schema)
        return GrammarSource(kind, msgspec.json.encode(schema).decode())
    if kind is GrammarKind.STRUCTURAL_TAG:
        tag = read_json(text)
        _check_properties(tag, properties_max)
        tag = _structural_tag(tag, whitespace_max)
        return GrammarSource(kind, msgspec.json.encode(tag).decode())
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
        raise invalid_grammar(
            f"{count} properties, more than {properties_max} (grammar.properties_max)"
        )


def _structural_tag(tag: Json, whitespace_max: int) -> Json:
    """Free text with tags inside; a tag of `structures` and `triggers` becomes the newer form."""
    if not isinstance(tag, dict):
        raise invalid_grammar("a structural tag is a JSON object")
    format_ = _triggered(tag) if "structures" in tag else tag.get("format")
    return {"type": "structural_tag", "format": _node(format_, whitespace_max, 0)}


def _triggered(tag: dict[str, Json]) -> Json:
    """The older form: free text until a trigger, then one of the tags that begin with it."""
    structures = tag["structures"]
    if not isinstance(structures, list):
        raise invalid_grammar("structures is a list")
    tags: list[Json] = [_tag(structure) for structure in structures]
    return {"type": "triggered_tags", "triggers": tag.get("triggers", []), "tags": tags}


def _tag(structure: Json) -> Json:
    if not isinstance(structure, dict):
        raise invalid_grammar("a structure is a JSON object")
    return {
        "type": "tag",
        "begin": structure.get("begin"),
        "content": {"type": "json_schema", "json_schema": structure.get("schema", {})},
        "end": structure.get("end"),
    }


def _node(node: Json, whitespace_max: int, depth: int) -> Json:
    if depth > DEPTH_MAX:
        raise invalid_grammar("nested too deep")
    if isinstance(node, list):
        return [_node(part, whitespace_max, depth + 1) for part in node]
    if not isinstance(node, dict):
        return node
    kind = node.get("type")
    if kind == "json_schema":
        return _content(node, whitespace_max)
    if isinstance(kind, str) and kind in _OF_TOKENS:
        # The tokens of tags are mostly special tokens, which have no text.
        raise invalid_grammar(f"{kind} is not supported; tags are found in the text")
    for word, characters_max in (("pattern", PATTERN_MAX), ("grammar", RULES_MAX)):
        length = len(str(node.get(word, "")))
        if length > characters_max:
            raise invalid_grammar(f"{word} has {length} characters; the limit is {characters_max}")
    return {word: _node(part, whitespace_max, depth + 1) for word, part in node.items()}


def _content(node: dict[str, Json], whitespace_max: int) -> Json:
    """JSON of a schema. The other styles are notations of certain models, with no free space."""
    if node.get("style", "json") != "json":
        return node
    prepare_schema(node.get("json_schema"))
    return {"max_whitespace_cnt": whitespace_max, **node}
