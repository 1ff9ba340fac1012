"""Grammars of answers that think first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.wire.errors import InvalidRequest
from antiphon.wire.grammar import Grammar, GrammarKind

if TYPE_CHECKING:
    from antiphon.gateway.parsing.reasoning.format import ReasoningFormat
    from antiphon.wire.schemas import Json


def after_thinking(
    grammar: Grammar, format_: ReasoningFormat, *, inside: bool, end_id: int | None
) -> Grammar:
    """Let the answer think before it keeps to the grammar.

    Args:
        grammar: What follows the thinking.
        format_: How it is marked.
        inside: Whether the answer begins as thinking: then it begins with a grammar only after
            the mark. Otherwise it may think or not.
        end_id: The token of the mark at the end, if it is one token.

    Raises:
        InvalidRequest: The grammar is nested deeper than can be written.
    """
    if inside and end_id is not None:
        return msgspec.structs.replace(grammar, begins_after=(end_id,))
    if format_.special:
        # No grammar writes special tokens: thinking that is not begun yet cannot be allowed.
        return grammar
    begin = "" if inside else format_.begin
    within: Json = {"type": "any_text"}
    marked: Json = {"type": "tag", "begin": begin, "content": within, "end": format_.end}
    # The parser of the answer drops white space behind thinking, and only there: without thinking
    # it would be a part of an answer that the grammar forbids.
    white: Json = {"type": "regex", "pattern": r"\n{0,2}"}
    thinking: Json = {"type": "sequence", "elements": [marked, white]}
    if not inside:
        thinking = {"type": "optional", "content": thinking}
    tag: Json = {
        "type": "structural_tag",
        "format": {"type": "sequence", "elements": [thinking, _node(grammar)]},
    }
    try:
        text = msgspec.json.encode(tag).decode()
    except RecursionError as error:
        raise InvalidRequest(
            "the form of the answer is nested too deep", param="grammar"
        ) from error
    return Grammar(kind=GrammarKind.STRUCTURAL_TAG, text=text)


def _node(grammar: Grammar) -> Json:
    """The grammar as a part of a structural tag."""
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
    """A text that is not JSON stays one: what compiles the grammar refuses it, and says why."""
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
