"""Tools of a response: functions, custom tools, namespaces of both; built-in tools are ignored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, cast

import msgspec

from antiphon.gateway.http.core.chat import to_json
from antiphon.gateway.http.core.fields import decode
from antiphon.gateway.http.core.limits import Json
from antiphon.wire.errors import InvalidRequest

INPUT = "input"
"""The only argument of a custom tool, which the model sees as a function."""
_BETWEEN = "__"
"""Separates namespace and name in the tool name that the model sees."""
_FREE_TEXT = {
    "type": "object",
    "properties": {INPUT: {"type": "string", "description": "The whole input of the tool."}},
    "required": [INPUT],
    "additionalProperties": False,
}


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function"):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, msgspec.Raw] | None = None
    strict: bool = True


class InputFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Input format of a custom tool. A grammar is shown to the model but not enforced."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomTool(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="custom"):
    """A tool with free-form text input."""

    name: str
    description: str | None = None
    format: InputFormat | None = None


class NamespaceTool(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="namespace"):
    """A namespace of tools."""

    name: str
    description: str | None = None
    tools: list[FunctionTool | CustomTool]


ResponseTool = FunctionTool | CustomTool | NamespaceTool


class ToolTarget(msgspec.Struct, frozen=True):
    """The client's tool behind a name that the model sees."""

    name: str
    namespace: str | None = None
    custom: bool = False


class ResponseTools(msgspec.Struct, frozen=True, kw_only=True):
    """The tools of a request: as the response returns them, and as the model sees them in a chat.

    `targets` are the client's tools by the names that the model sees; `paths` are their paths.
    `requires_strict` if the client set `strict`; by default tools are strict if possible.
    """

    response_tools: tuple[ResponseTool, ...] = ()
    chat: tuple[Json, ...] = ()
    targets: Mapping[str, ToolTarget] = {}
    paths: tuple[str, ...] = ()
    requires_strict: bool = False
    warnings: tuple[str, ...] = ()


def read_response_tools(raw: Sequence[Json]) -> ResponseTools:
    response_tools: list[ResponseTool] = []
    chat: list[Json] = []
    targets: dict[str, ToolTarget] = {}
    paths: list[str] = []
    warnings: list[str] = []
    requires_strict = False
    for index, each in enumerate(raw):
        at = f"tools[{index}]"
        value = cast("dict[str, object]", to_json(each, at))
        kind = value.get("type")
        if not isinstance(kind, str):
            raise InvalidRequest.at(f"{at}.type", "a tool requires a type")
        if kind not in _KINDS:
            warnings.append(f"{at} was ignored: the built-in tool '{kind}' is not supported")
            continue
        requires_strict = requires_strict or _sets_strict(value)
        top = decode(msgspec.json.encode(_with_default_strictness(value)), _KINDS[kind], at)
        response_tools.append(top)
        warnings += _grammar_warnings(top, at)
        for name, target, tool, inner in _each(top):
            chat.append(_chat_tool(name, tool))
            targets[name] = target
            paths.append(at + inner)
    return ResponseTools(
        response_tools=tuple(response_tools),
        chat=tuple(chat),
        targets=targets,
        paths=tuple(paths),
        requires_strict=requires_strict,
        warnings=tuple(warnings),
    )


def model_name(name: str, namespace: str | None) -> str:
    return name if not namespace else f"{namespace}{_BETWEEN}{name}"


def custom_arguments(text: str) -> str:
    return msgspec.json.encode({INPUT: text}).decode()


def custom_input(arguments: str) -> str:
    """Return the input of a custom tool, or the model's text if it is not the expected argument."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, str])[INPUT]
    except (msgspec.DecodeError, KeyError, RecursionError, ValueError):
        return arguments


_KINDS: Mapping[str, type[ResponseTool]] = {
    "function": FunctionTool,
    "custom": CustomTool,
    "namespace": NamespaceTool,
}


def _each(tool: ResponseTool) -> Iterator[tuple[str, ToolTarget, _OneTool, str]]:
    """Yield the callable tools: the name that the model sees, the tool, its path."""
    if isinstance(tool, NamespaceTool):
        for index, one in enumerate(tool.tools):
            target = ToolTarget(one.name, tool.name, isinstance(one, CustomTool))
            yield model_name(one.name, tool.name), target, one, f".tools[{index}]"
    else:
        yield tool.name, ToolTarget(tool.name, None, isinstance(tool, CustomTool)), tool, ""


_OneTool = FunctionTool | CustomTool


def _with_default_strictness(value: dict[str, object]) -> dict[str, object]:
    if value.get("type") == "function":
        return value | {"strict": value.get("strict") is not False}
    tools = value.get("tools")
    if isinstance(tools, list):
        each = cast("list[object]", tools)
        return value | {
            "tools": [
                _with_default_strictness(cast("dict[str, object]", tool))
                if isinstance(tool, dict)
                else tool
                for tool in each
            ]
        }
    return value


def _sets_strict(value: dict[str, object]) -> bool:
    tools = value.get("tools")
    inner = cast("list[object]", tools) if isinstance(tools, list) else []
    return value.get("strict") is True or any(
        _sets_strict(cast("dict[str, object]", tool)) for tool in inner if isinstance(tool, dict)
    )


def _grammar_warnings(tool: ResponseTool, at: str) -> list[str]:
    tools = tool.tools if isinstance(tool, NamespaceTool) else [tool]
    return [
        f"{at}: the grammar of '{one.name}' is shown to the model but not enforced"
        for one in tools
        if isinstance(one, CustomTool) and one.format and one.format.type == "grammar"
    ]


def _chat_tool(name: str, tool: _OneTool) -> Json:
    custom = isinstance(tool, CustomTool)
    function: dict[str, object] = {
        "name": name,
        "description": _described(tool) if custom else tool.description,
        "parameters": _FREE_TEXT if custom else tool.parameters,
        "strict": False if custom else tool.strict,
    }
    given = {word: value for word, value in function.items() if value is not None}
    whole = {"type": "function", "function": given}
    return msgspec.json.decode(msgspec.json.encode(whole), type=dict[str, msgspec.Raw])


def _described(tool: CustomTool) -> str | None:
    """Return the description, with the grammar of the input if it has one."""
    form = tool.format
    if form is None or form.type != "grammar" or not form.definition:
        return tool.description
    grammar = f"The input matches this {form.syntax or 'lark'} grammar:\n{form.definition}"
    return f"{tool.description}\n{grammar}" if tool.description else grammar
