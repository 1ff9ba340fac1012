"""Grammars of tool calls, and of output with reasoning before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.wire.errors import InvalidRequest
from antiphon.wire.sampling import GRAMMAR_TEXT_MAX, Grammar, GrammarKind

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from antiphon.gateway.parsing.reasoning import ReasoningFormat
    from antiphon.gateway.parsing.tools.format import CallGrammar
    from antiphon.gateway.parsing.tools.tool import Tool
    from antiphon.wire.schemas import Json

_DEFINITIONS = ("$defs", "definitions")
_ANY_OBJECT: dict[str, Json] = {"type": "object"}


def calls_list(tools: Sequence[Tool], calls_max: int | None) -> Grammar:
    held = {tool.name for tool in tools}
    return _grammar(GrammarKind.JSON_SCHEMA, _list_schema(tools, calls_max, held))


def calls_or_text(tools: Sequence[Tool]) -> Grammar:
    """A JSON list of calls, those of strict tools with their schemas; or text that is not JSON.

    Text that starts like JSON could be parsed as an unconstrained call.
    """
    held = {tool.name for tool in tools if tool.strict}
    calls: Json = {"type": "json_schema", "json_schema": _list_schema(tools, None, held)}
    other: Json = {"type": "regex", "pattern": r"[^\[{\s][\s\S]*"}
    return _structural_tag({"type": "or", "elements": [calls, other]})


def _list_schema(
    tools: Sequence[Tool], calls_max: int | None, held: Collection[str]
) -> dict[str, Json]:
    calls: list[Json] = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.name},
                "parameters": _without_defs(tool) if tool.name in held else _ANY_OBJECT,
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    schema: dict[str, Json] = {
        "type": "array",
        "minItems": 1,
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
    }
    if calls_max is not None:
        schema["maxItems"] = calls_max
    for word in _DEFINITIONS:
        if definitions := _definitions([tool for tool in tools if tool.name in held], word):
            schema[word] = definitions
    return schema


def calls_only(tools: Sequence[Tool], form: CallGrammar, calls_max: int | None) -> Grammar:
    """Calls in the model's format only."""
    return _structural_tag(
        {
            "type": "tags_with_separator",
            "tags": [_tag(tool, form, held=True) for tool in tools],
            "separator": form.separator,
            "at_least_one": True,
            "stop_after_first": calls_max == 1,
        }
    )


def calls_within(tools: Sequence[Tool], form: CallGrammar) -> Grammar:
    """Free text that may contain calls; those of strict tools conform to their schemas."""
    return _structural_tag(
        {
            "type": "triggered_tags",
            "triggers": [form.trigger],
            "tags": [_tag(tool, form, held=tool.strict) for tool in tools],
            "excludes": list(form.excludes),
        }
    )


def calls_or(calls: Grammar, form: Grammar) -> Grammar:
    return _structural_tag({"type": "or", "elements": [_node(calls), _node(form)]})


def _tag(tool: Tool, form: CallGrammar, *, held: bool) -> Json:
    content: dict[str, Json] = {
        "type": "json_schema",
        "json_schema": tool.parameters if held else _ANY_OBJECT,
    }
    if form.style != "json":
        # Nothing else bounds white space in these formats, which might never end.
        content |= {"style": form.style, "max_whitespace_cnt": 1}
    return {
        "type": "tag",
        "begin": f"{form.begin}{tool.name}{form.middle}",
        "content": content,
        "end": form.end,
    }


def _without_defs(tool: Tool) -> Json:
    return {word: part for word, part in tool.parameters.items() if word not in _DEFINITIONS}


def _definitions(tools: Sequence[Tool], word: str) -> dict[str, Json]:
    """Merge the definitions of the tools' schemas to the top level, where references resolve."""
    made: dict[str, Json] = {}
    for tool in tools:
        definitions = tool.parameters.get(word)
        for name, part in definitions.items() if isinstance(definitions, dict) else ():
            if made.setdefault(name, part) != part:
                text = f"two of them define {name!r} differently in their {word}"
                raise InvalidRequest.at("tools", text)
    return made


def _structural_tag(format_: Json) -> Grammar:
    return _grammar(GrammarKind.STRUCTURAL_TAG, {"type": "structural_tag", "format": format_})


def _grammar(kind: GrammarKind, tree: Json) -> Grammar:
    text = _encoded(tree, "tools: the schema", "tools")
    if len(text) > GRAMMAR_TEXT_MAX:
        problem = f"the schemas have {len(text)} characters; the limit is {GRAMMAR_TEXT_MAX}"
        raise InvalidRequest.at("tools", problem)
    return Grammar(kind=kind, text=text)


def _encoded(tree: Json, what: str, param: str) -> str:
    try:
        return msgspec.json.encode(tree).decode()
    except RecursionError as error:
        raise InvalidRequest(f"{what} is nested too deeply", param=param) from error


def after_thinking(
    grammar: Grammar, format_: ReasoningFormat, *, inside: bool, end_id: int | None
) -> Grammar:
    """Allow reasoning before the grammar applies.

    If the output starts `inside` it, the grammar applies only after the end delimiter, whose token
    is `end_id` if it is a single one. Otherwise reasoning is optional.
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
        "format": {"type": "sequence", "elements": [thinking, _node(grammar)]},
    }
    text = _encoded(tag, "the output constraint", "grammar")
    return Grammar(kind=GrammarKind.STRUCTURAL_TAG, text=text)


def _node(grammar: Grammar) -> Json:
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
