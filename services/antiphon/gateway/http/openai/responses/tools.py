"""The tools of a response: functions, custom tools, namespaces of both, and what is left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, cast

import msgspec

from antiphon.gateway.http.core.fields import decode
from antiphon.gateway.http.core.tool_calls import to_json
from antiphon.gateway.http.openai.schema import Json
from antiphon.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


INPUT = "input"
"""The one argument of a custom tool as the model sees it: a function."""
_BETWEEN = "__"
"""Stands between a namespace and a name where the model sees both as one."""
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
    """What the input of a custom tool looks like. A grammar is shown to the model, not held."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomTool(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="custom"):
    """A tool whose input is free text."""

    name: str
    description: str | None = None
    format: InputFormat | None = None


class NamespaceTool(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="namespace"):
    """Tools under a common name."""

    name: str
    description: str | None = None
    tools: list[FunctionTool | CustomTool]


ResponseTool = FunctionTool | CustomTool | NamespaceTool


class ToolTarget(msgspec.Struct, frozen=True):
    """What a client calls the tool that the model knows by one name."""

    name: str
    namespace: str | None = None
    custom: bool = False


class ResponseTools(msgspec.Struct, frozen=True, kw_only=True):
    """The tools of a request.

    Attributes:
        told: As the response shows them.
        chat: As chats write them.
        targets: What each is to the client, by the name that the model sees.
        places: Where each of these stands in the request.
        insists: Whether the client has said of one that it is strict; unsaid, they are, too.
        warnings: What was left out.
    """

    told: tuple[ResponseTool, ...] = ()
    chat: tuple[Json, ...] = ()
    targets: Mapping[str, ToolTarget] = {}
    places: tuple[str, ...] = ()
    insists: bool = False
    warnings: tuple[str, ...] = ()


def read_response_tools(raw: Sequence[Json]) -> ResponseTools:
    """Read the tools of a response. Built-in ones of other servers are left out.

    Raises:
        InvalidRequest: A tool is malformed; `param` names it.
    """
    told: list[ResponseTool] = []
    told_at: list[str] = []
    warnings: list[str] = []
    insists = False
    for index, each in enumerate(raw):
        at = f"tools[{index}]"
        value = cast("dict[str, object]", to_json(each, at))
        kind = value.get("type")
        if not isinstance(kind, str):
            raise InvalidRequest(f"{at}.type: a tool names its type", param=f"{at}.type")
        if kind not in _KINDS:
            warnings.append(f"{at} was left out: there is no built-in tool '{kind}' here")
            continue
        insists = insists or _says_strict(value)
        told.append(decode(msgspec.json.encode(_loose(value)), _KINDS[kind], at))
        told_at.append(at)
        warnings += _not_held(told[-1], at)
    chat: list[Json] = []
    targets: dict[str, ToolTarget] = {}
    places: list[str] = []
    for top, at in zip(told, told_at, strict=True):
        for name, target, tool, inner in _each(top):
            chat.append(_chat_tool(name, tool))
            targets[name] = target
            places.append(at + inner)
    return ResponseTools(
        told=tuple(told),
        chat=tuple(chat),
        targets=targets,
        places=tuple(places),
        insists=insists,
        warnings=tuple(warnings),
    )


def model_name(name: str, namespace: str | None) -> str:
    """What the model sees as the name of a tool."""
    return name if not namespace else f"{namespace}{_BETWEEN}{name}"


def custom_arguments(text: str) -> str:
    """The input of a custom tool as the arguments of a function."""
    return msgspec.json.encode({INPUT: text}).decode()


def custom_input(arguments: str) -> str:
    """The input of a custom tool: what the model wrote, if that is not the one argument."""
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
    """Tools that can be called: the name that the model sees, what each is, and its place."""
    if isinstance(tool, NamespaceTool):
        for index, one in enumerate(tool.tools):
            target = ToolTarget(one.name, tool.name, isinstance(one, CustomTool))
            yield model_name(one.name, tool.name), target, one, f".tools[{index}]"
    else:
        yield tool.name, ToolTarget(tool.name, None, isinstance(tool, CustomTool)), tool, ""


_OneTool = FunctionTool | CustomTool


def _loose(value: dict[str, object]) -> dict[str, object]:
    """Functions are strict unless they say otherwise; null is as good as nothing."""
    if value.get("type") == "function":
        return value | {"strict": value.get("strict") is not False}
    tools = value.get("tools")
    if isinstance(tools, list):
        each = cast("list[object]", tools)
        return value | {
            "tools": [
                _loose(cast("dict[str, object]", tool)) if isinstance(tool, dict) else tool
                for tool in each
            ]
        }
    return value


def _says_strict(value: dict[str, object]) -> bool:
    tools = value.get("tools")
    inner = cast("list[object]", tools) if isinstance(tools, list) else []
    return value.get("strict") is True or any(
        _says_strict(cast("dict[str, object]", tool)) for tool in inner if isinstance(tool, dict)
    )


def _not_held(tool: ResponseTool, at: str) -> list[str]:
    tools = tool.tools if isinstance(tool, NamespaceTool) else [tool]
    return [
        f"{at}: the model sees the grammar of '{one.name}' and is not held to it"
        for one in tools
        if isinstance(one, CustomTool) and one.format and one.format.type == "grammar"
    ]


def _chat_tool(name: str, tool: _OneTool) -> Json:
    """As chats write it."""
    if isinstance(tool, CustomTool):
        function: dict[str, object] = {
            "name": name,
            "description": _described(tool),
            "parameters": _FREE_TEXT,
            "strict": False,
        }
    else:
        function = {
            "name": name,
            "description": tool.description,
            "parameters": tool.parameters,
            "strict": tool.strict,
        }
    given = {word: value for word, value in function.items() if value is not None}
    whole = {"type": "function", "function": given}
    return msgspec.json.decode(msgspec.json.encode(whole), type=dict[str, msgspec.Raw])


def _described(tool: CustomTool) -> str | None:
    """Its description, and the grammar of its input, if it has one."""
    form = tool.format
    if form is None or form.type != "grammar" or not form.definition:
        return tool.description
    grammar = f"The input matches this {form.syntax or 'lark'} grammar:\n{form.definition}"
    return f"{tool.description}\n{grammar}" if tool.description else grammar
