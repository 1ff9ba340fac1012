"""Grammars that apply after reasoning."""

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
    """Allow reasoning before the grammar applies.

    Args:
        grammar: Grammar of the text after the reasoning.
        format_: Reasoning format.
        inside: Whether the output starts in reasoning: then the grammar applies only after the end
            delimiter. Otherwise reasoning is optional.
        end_id: Token of the end delimiter, if it is a single token.

    Raises:
        InvalidRequest: The grammar is nested too deeply.
    """
    if inside and end_id is not None:
        return msgspec.structs.replace(grammar, begins_after=(end_id,))
    if format_.special:
        # Grammars cannot produce special tokens: reasoning that has not begun yet cannot be
        # allowed.
        return grammar
    begin = "" if inside else format_.begin
    within: Json = {"type": "any_text"}
    marked: Json = {"type": "tag", "begin": begin, "content": within, "end": format_.end}
    # The output parser drops white space after reasoning, and only there: without reasoning it
    # would be part of an output that the grammar forbids.
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
            "the output constraint is nested too deeply", param="grammar"
        ) from error
    return Grammar(kind=GrammarKind.STRUCTURAL_TAG, text=text)
