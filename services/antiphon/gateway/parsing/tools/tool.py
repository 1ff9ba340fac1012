"""The validated tools of a request, the schemas of their arguments, and what an output may call."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import msgspec

from antiphon.wire.errors import OPENAI_CODE, InvalidRequest, Unsupported
from antiphon.wire.schemas import Json

TOOLS_MAX = 512  # maximum number of tools of one request
DEPTH_MAX = 100  # maximum nesting depth of schemas

_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,128}")
_NO_ARGUMENTS: dict[str, Json] = {"type": "object", "properties": {}}

TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
_TYPES_SHOWN = ", ".join(sorted(TYPES))
_ALIASES = {
    **dict.fromkeys(("str", "text", "char", "varchar"), "string"),
    **dict.fromkeys(("int", "bigint", "smallint", "tinyint", "int32", "int64", "long"), "integer"),
    **dict.fromkeys(("float", "double", "decimal", "float32", "float64"), "number"),
    "bool": "boolean",
    **dict.fromkeys(("list", "tuple"), "array"),
    **dict.fromkeys(("dict", "map"), "object"),
}
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_SINGLE = frozenset(
    {
        "items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems",
        "propertyNames", "not", "if", "then", "else", "contains", "contentSchema",
    }
)  # fmt: skip
_COUNTS = frozenset(
    {
        "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties",
        "minContains", "maxContains",
    }
)  # fmt: skip
_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_TEXTS = frozenset({"pattern", "format", "title", "description", "$ref", "$id", "$anchor"})


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


def read_tools(tools: Sequence[Json]) -> tuple[Tool, ...]:
    """Validate the tools of a request, in OpenAI's format. Errors have the path in `param`.

    `{"type": "function", "function": {"name", "description", "parameters", "strict"}}`
    """
    if len(tools) > TOOLS_MAX:
        text = f"tools has {len(tools)} tools; at most {TOOLS_MAX} are allowed"
        raise InvalidRequest(text, param="tools")
    read = tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools))
    seen: set[str] = set()
    for index, tool in enumerate(read):
        if tool.name in seen:
            at = f"tools[{index}].function.name"
            raise InvalidRequest.at(at, f"another tool is also named {tool.name!r}")
        seen.add(tool.name)
    return read


def _tool(tool: Json, at: str) -> Tool:
    if not isinstance(tool, dict):
        raise InvalidRequest.at(at, "a tool must be an object")
    kind = tool.get("type", "function")
    if kind != "function":
        raise Unsupported.at(f"{at}.type", "only tools of type 'function' are supported")
    at += ".function"
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest.at(at, "function is required and must be an object")
    name = _name(function.get("name"), f"{at}.name")
    return Tool(
        name=name,
        parameters=_parameters(name, function.get("parameters"), f"{at}.parameters"),
        strict=function.get("strict") is True,
        written=_written(function, f"{at}.description"),
    )


def _name(name: Json, at: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        text = "a name must have 1 to 128 letters, digits, dots, dashes and underscores"
        raise InvalidRequest.at(at, text)
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
        raise InvalidRequest.at(at, "parameters must be a JSON schema, which is an object")
    if json_type(parameters.get("type", "object")) != "object":
        raise InvalidRequest.at(f"{at}.type", 'must be "object"')
    schema = checked_schema(parameters, at)
    assert isinstance(schema, dict), "an object stays an object"
    return {**schema, "type": "object"}


def _written(function: dict[str, Json], at: str) -> dict[str, Json]:
    if not isinstance(function.get("description"), str | None):
        raise InvalidRequest.at(at, "a description must be a string")
    inner: dict[str, Json] = {word: part for word, part in function.items() if word != "strict"}
    return {"type": "function", "function": inner}


def checked_schema(schema: Json, at: str, depth: int = 0) -> Json:
    """Return the schema with JSON's names of types, if its form is that of Draft 2020-12.

    Raises:
        InvalidRequest: It is not; `param` has the path of the error, which starts with `at`.
    """
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise InvalidRequest.at(at, "a schema must be an object, true or false")
    if depth > DEPTH_MAX:
        raise InvalidRequest.at(at, "the schema is nested too deeply")
    return {word: _checked_value(word, schema[word], f"{at}.{word}", depth + 1) for word in schema}


def _checked_value(word: str, value: Json, at: str, depth: int) -> Json:
    if word == "type":
        return _checked_type(value, at)
    if word in _SINGLE:
        return checked_schema(value, at, depth)
    is_valid, wrong = _FORMS.get(word, (None, ""))
    if is_valid is not None and not is_valid(value):
        raise InvalidRequest.at(at, f"{wrong}")
    if word in _MAPS and isinstance(value, dict):
        return {name: checked_schema(value[name], f"{at}.{name}", depth) for name in value}
    if word in _LISTS and isinstance(value, list):
        return [checked_schema(part, f"{at}.{n}", depth) for n, part in enumerate(value)]
    return value


def _checked_type(value: Json, at: str) -> Json:
    named = json_type(value)
    for type_ in named if isinstance(named, list) and named else [named]:
        if not isinstance(type_, str) or type_ not in TYPES:
            text = f"{type_!r} is not a type; the types are {_TYPES_SHOWN}"
            raise InvalidRequest.at(at, text)
    return named


def json_type(value: Json) -> Json:
    """Replace names of types of databases and programming languages by JSON's."""
    if isinstance(value, list):
        return [json_type(part) for part in value]
    if isinstance(value, str) and value not in TYPES:
        return _ALIASES.get(value.lower(), value.lower() if value.lower() in TYPES else value)
    return value


def _are_names(value: Json) -> bool:
    if not isinstance(value, list):
        return False
    names = [name for name in value if isinstance(name, str)]
    return len(names) == len(value) == len(set(names))


def _is_number(value: Json) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Json) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


_FORMS: dict[str, tuple[Callable[[Json], bool], str]] = {
    **dict.fromkeys(_MAPS, (lambda value: isinstance(value, dict), "must be an object")),
    **dict.fromkeys(
        _LISTS, (lambda value: isinstance(value, list) and bool(value), "must be a list of schemas")
    ),
    "enum": (lambda value: isinstance(value, list), "must be a list"),
    "required": (_are_names, "must be a list of distinct names"),
    **dict.fromkeys(_COUNTS, (_is_count, "must be a non-negative integer")),
    **dict.fromkeys(_NUMBERS, (_is_number, "must be a number")),
    **dict.fromkeys(_TEXTS, (lambda value: isinstance(value, str), "must be a string")),
}
