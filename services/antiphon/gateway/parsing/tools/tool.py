"""The tools of a request, checked."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.parsing.tools.schema import check, normalised
from antiphon.wire.errors import OPENAI_CODE, InvalidRequest, Unsupported
from antiphon.wire.schemas import Json

if TYPE_CHECKING:
    from collections.abc import Sequence

TOOLS_MAX = 512
"""Most tools of one request."""

_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,128}")
_NO_ARGUMENTS: dict[str, Json] = {"type": "object", "properties": {}}


class Tool(msgspec.Struct, frozen=True):
    """A function that the model may call.

    Attributes:
        parameters: The JSON schema of its arguments, an object's.
        strict: Whether the arguments have to keep to it.
        written: What the client wrote, for the chat template, `strict` left out.
    """

    name: str
    parameters: dict[str, Json]
    strict: bool
    written: dict[str, Json]


def read_tools(tools: Sequence[Json], *, param: str = "tools") -> tuple[Tool, ...]:
    """Check the tools of a request, in OpenAI's form.

    `{"type": "function", "function": {"name", "description", "parameters", "strict"}}`

    Args:
        tools: Decoded JSON.
        param: What the request calls them, for errors.

    Raises:
        InvalidRequest: A tool is malformed, or two have one name; `param` names the place.
        Unsupported: A tool is no function.
    """
    if len(tools) > TOOLS_MAX:
        raise InvalidRequest(
            f"{param} has {len(tools)} tools; {TOOLS_MAX} are allowed", param=param
        )
    read = tuple(_tool(tool, f"{param}[{index}]") for index, tool in enumerate(tools))
    seen: set[str] = set()
    for index, tool in enumerate(read):
        if tool.name in seen:
            at = f"{param}[{index}].function.name"
            raise InvalidRequest(f"{at}: there are two tools named {tool.name!r}", param=at)
        seen.add(tool.name)
    return read


def _tool(tool: Json, at: str) -> Tool:
    if not isinstance(tool, dict):
        raise InvalidRequest(f"{at}: a tool is an object", param=at)
    kind = tool.get("type", "function")
    if kind != "function":
        message = f"{at}.type: only tools of type 'function' are supported"
        raise Unsupported(message, param=f"{at}.type")
    at += ".function"
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest(f"{at}: a tool needs a function, an object", param=at)
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
        message = f"{at}: a name is 1 to 128 letters, digits, dots, dashes and underscores"
        raise InvalidRequest(message, param=at)
    return name


def _parameters(tool: str, parameters: Json, at: str) -> dict[str, Json]:
    """The schema of a tool's arguments.

    Raises:
        InvalidRequest: It is none: the text names the place in it, `param` the schema.
    """
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
        raise InvalidRequest(f"{at}: the parameters are a JSON schema, an object", param=at)
    schema = normalised(parameters)
    assert isinstance(schema, dict), "an object stays one"
    if schema.setdefault("type", "object") != "object":
        message = f'{at}.type: the schema is of an object: "type" has to be "object"'
        raise InvalidRequest(message, param=f"{at}.type")
    check(schema, at)
    return schema


def _written(function: dict[str, Json], at: str) -> dict[str, Json]:
    if not isinstance(function.get("description"), str | None):
        raise InvalidRequest(f"{at}: a description is text", param=at)
    inner: dict[str, Json] = {word: part for word, part in function.items() if word != "strict"}
    return {"type": "function", "function": inner}
