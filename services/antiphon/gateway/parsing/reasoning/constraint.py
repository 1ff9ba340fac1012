"""Grammars of answers that think first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.parsing.nodes import node_of
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
        "format": {"type": "sequence", "elements": [thinking, node_of(grammar)]},
    }
    try:
        text = msgspec.json.encode(tag).decode()
    except RecursionError as error:
        raise InvalidRequest(
            "the form of the answer is nested too deep", param="grammar"
        ) from error
    return Grammar(kind=GrammarKind.STRUCTURAL_TAG, text=text)
