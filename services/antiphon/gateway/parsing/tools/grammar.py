"""Grammars of tool calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.parsing.nodes import node_of
from antiphon.wire.errors import InvalidRequest
from antiphon.wire.grammar import GRAMMAR_TEXT_MAX, Grammar, GrammarKind

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from antiphon.gateway.parsing.tools.format import CallGrammar
    from antiphon.gateway.parsing.tools.tool import Tool
    from antiphon.wire.schemas import Json

_DEFINITIONS = ("$defs", "definitions")
_ANY_OBJECT: dict[str, Json] = {"type": "object"}


def calls_list(tools: Sequence[Tool], calls_max: int | None) -> Grammar:
    """A JSON list of calls only."""
    held = {tool.name for tool in tools}
    return _grammar(GrammarKind.JSON_SCHEMA, _list_schema(tools, calls_max, held))


def calls_or_text(tools: Sequence[Tool]) -> Grammar:
    """A JSON list of calls, those of strict tools with their schemas; or text that is not JSON.

    Text that starts like JSON could be parsed as an unconstrained call.
    """
    held = {tool.name for tool in tools if tool.strict}
    either: list[Json] = [
        {"type": "json_schema", "json_schema": _list_schema(tools, None, held)},
        {"type": "regex", "pattern": r"[^\[{\s][\s\S]*"},
    ]
    format_: Json = {"type": "or", "elements": either}
    return _grammar(GrammarKind.STRUCTURAL_TAG, {"type": "structural_tag", "format": format_})


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
        definitions = _definitions([tool for tool in tools if tool.name in held], word)
        if definitions:
            schema[word] = definitions
    return schema


def calls_only(tools: Sequence[Tool], form: CallGrammar, calls_max: int | None) -> Grammar:
    """Calls in the model's format only."""
    calls: Json = {
        "type": "tags_with_separator",
        "tags": [_tag(tool, form, held=True) for tool in tools],
        "separator": form.separator,
        "at_least_one": True,
        "stop_after_first": calls_max == 1,
    }
    around: list[Json] = [
        *([_text(form.before)] if form.before else []),
        calls,
        *([_text(form.after)] if form.after else []),
    ]
    format_: Json = calls if len(around) == 1 else {"type": "sequence", "elements": around}
    return _grammar(GrammarKind.STRUCTURAL_TAG, {"type": "structural_tag", "format": format_})


def calls_within(tools: Sequence[Tool], form: CallGrammar) -> Grammar:
    """Free text that may contain calls; those of strict tools conform to their schemas."""
    tags: list[Json] = [_tag(tool, form, held=tool.strict) for tool in tools]
    format_: dict[str, Json] = {
        "type": "triggered_tags",
        "triggers": [form.trigger],
        "tags": tags,
        "excludes": list(form.excludes),
    }
    return _grammar(GrammarKind.STRUCTURAL_TAG, {"type": "structural_tag", "format": format_})


def calls_or(calls: Grammar, form: Grammar) -> Grammar:
    """Calls only, or output that matches a constraint."""
    format_: Json = {"type": "or", "elements": [node_of(calls), node_of(form)]}
    return _grammar(GrammarKind.STRUCTURAL_TAG, {"type": "structural_tag", "format": format_})


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


def _text(value: str) -> Json:
    return {"type": "const_string", "value": value}


def _without_defs(tool: Tool) -> Json:
    return {word: part for word, part in tool.parameters.items() if word not in _DEFINITIONS}


def _definitions(tools: Sequence[Tool], word: str) -> dict[str, Json]:
    """Merge the definitions of the tools' schemas to the top level, where references resolve."""
    made: dict[str, Json] = {}
    for tool in tools:
        definitions = tool.parameters.get(word)
        for name, part in definitions.items() if isinstance(definitions, dict) else ():
            if made.setdefault(name, part) != part:
                message = f"tools: two of them define {name!r} differently in their {word}"
                raise InvalidRequest(message, param="tools")
    return made


def _grammar(kind: GrammarKind, tree: Json) -> Grammar:
    try:
        text = msgspec.json.encode(tree).decode()
    except RecursionError as error:
        raise InvalidRequest("tools: the schema is nested too deeply", param="tools") from error
    if len(text) > GRAMMAR_TEXT_MAX:
        message = f"tools: the schemas have {len(text)} characters; the limit is {GRAMMAR_TEXT_MAX}"
        raise InvalidRequest(message, param="tools")
    return Grammar(kind=kind, text=text)
