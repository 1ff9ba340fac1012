"""The validated tools of a request, and what an output may call of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.parsing.tools.schema import checked_schema, json_type
from antiphon.wire.errors import OPENAI_CODE, InvalidRequest, Unsupported
from antiphon.wire.schemas import Json

if TYPE_CHECKING:
    from collections.abc import Sequence

TOOLS_MAX = 512  # maximum number of tools of one request

_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,128}")
_NO_ARGUMENTS: dict[str, Json] = {"type": "object", "properties": {}}


class Tool(msgspec.Struct, frozen=True):
    """A function that the model may call."""

    name: str
    parameters: dict[str, Json]  # schema of the arguments, which are an object
    strict: bool  # the arguments must conform to it
    written: dict[str, Json]  # as sent, without `strict`, for the chat template


class OfferedTools(msgspec.Struct, frozen=True, kw_only=True):
    """The tools available to an output, and which of its calls count."""

    schemas: Mapping[str, Json] = {}  # of the arguments of each tool
    calls_before: int = 0  # in the conversation, from which some formats count
    calls_max: int | None = None  # further calls are dropped

    def schema(self, name: str) -> Json:
        """The schema of a tool's arguments; None if it is unavailable."""
        return (self.schemas[name] or {}) if name in self.schemas else None


def read_tools(tools: Sequence[Json], *, param: str = "tools") -> tuple[Tool, ...]:
    """Validate the tools of a request, in OpenAI's format. Errors have the path in `param`.

    `{"type": "function", "function": {"name", "description", "parameters", "strict"}}`
    """
    if len(tools) > TOOLS_MAX:
        raise InvalidRequest(
            f"{param} has {len(tools)} tools; at most {TOOLS_MAX} are allowed", param=param
        )
    read = tuple(_tool(tool, f"{param}[{index}]") for index, tool in enumerate(tools))
    seen: set[str] = set()
    for index, tool in enumerate(read):
        if tool.name in seen:
            at = f"{param}[{index}].function.name"
            raise InvalidRequest(f"{at}: another tool is also named {tool.name!r}", param=at)
        seen.add(tool.name)
    return read


def _tool(tool: Json, at: str) -> Tool:
    if not isinstance(tool, dict):
        raise InvalidRequest(f"{at}: a tool must be an object", param=at)
    kind = tool.get("type", "function")
    if kind != "function":
        message = f"{at}.type: only tools of type 'function' are supported"
        raise Unsupported(message, param=f"{at}.type")
    at += ".function"
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest(f"{at}: function is required and must be an object", param=at)
    strict = function.get("strict")
    name = _name(function.get("name"), f"{at}.name")
    return Tool(
        name=name,
        parameters=_parameters(name, function.get("parameters"), f"{at}.parameters"),
        strict=strict is True,
        written=_written(function, f"{at}.description"),
    )


def _name(name: Json, at: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        message = f"{at}: a name must have 1 to 128 letters, digits, dots, dashes and underscores"
        raise InvalidRequest(message, param=at)
    return name


def _parameters(tool: str, parameters: Json, at: str) -> dict[str, Json]:
    """Validate the schema of a tool's arguments. The path inside it is only in the message."""
    try:
        return _schema(parameters, at)
    except InvalidRequest as error:
        raise InvalidRequest(
            f"{error.message}; the schema of function {tool!r} is invalid",
            param=at,
            details={OPENAI_CODE: "invalid_function_parameters"},
        ) from error


def _schema(parameters: Json, at: str) -> dict[str, Json]:
    if parameters is None or parameters == {}:
        return dict(_NO_ARGUMENTS)
    if not isinstance(parameters, dict):
        raise InvalidRequest(
            f"{at}: parameters must be a JSON schema, which is an object", param=at
        )
    if json_type(parameters.get("type", "object")) != "object":
        message = f'{at}.type: must be "object"'
        raise InvalidRequest(message, param=f"{at}.type")
    schema = checked_schema(parameters, at)
    assert isinstance(schema, dict), "an object stays an object"
    return {**schema, "type": "object"}


def _written(function: dict[str, Json], at: str) -> dict[str, Json]:
    if not isinstance(function.get("description"), str | None):
        raise InvalidRequest(f"{at}: a description must be a string", param=at)
    inner: dict[str, Json] = {word: part for word, part in function.items() if word != "strict"}
    return {"type": "function", "function": inner}
