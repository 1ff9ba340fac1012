"""Converts any grammar to a part of a structural tag."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.wire.grammar import Grammar, GrammarKind

if TYPE_CHECKING:
    from antiphon.wire.schemas import Json


def node_of(grammar: Grammar) -> Json:
    """Convert a grammar to a structural tag format."""
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case GrammarKind.JSON_SCHEMA:
            return {"type": "json_schema", "json_schema": _decoded(grammar.text)}
        case GrammarKind.REGEX:
            return {"type": "regex", "pattern": grammar.text}
        case GrammarKind.EBNF:
            return {"type": "grammar", "grammar": grammar.text}
        case GrammarKind.STRUCTURAL_TAG:
            return _tags(_decoded(grammar.text))


def _decoded(text: str) -> Json:
    """Decode JSON; other text stays text, which the grammar compiler rejects with a reason."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text


def _tags(tag: Json) -> Json:
    if not isinstance(tag, dict) or "structures" not in tag:
        return tag.get("format") if isinstance(tag, dict) else tag
    structures = tag["structures"]
    tags: list[Json] = [
        {
            "type": "tag",
            "begin": structure.get("begin"),
            "content": {"type": "json_schema", "json_schema": structure.get("schema", {})},
            "end": structure.get("end"),
        }
        for structure in (structures if isinstance(structures, list) else [])
        if isinstance(structure, dict)
    ]
    return {"type": "triggered_tags", "triggers": tag.get("triggers", []), "tags": tags}
