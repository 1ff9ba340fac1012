"""Tool schemas: validation of their form, and type names of databases and programming languages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from antiphon.wire.schemas import Json

DEPTH_MAX = 100  # maximum nesting depth of schemas

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
_REFERENCES_MAX = 8
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


def check(schema: Json, at: str, depth: int = 0) -> None:
    """Validate the form of a schema against Draft 2020-12.

    Args:
        schema: Decoded JSON.
        at: Its path, for errors.
        depth: Its nesting depth.

    Raises:
        InvalidRequest: It is invalid; `param` has the path.
    """
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{at}: a schema must be an object, true or false", param=at)
    if depth > DEPTH_MAX:
        raise InvalidRequest(f"{at}: the schema is nested too deeply", param=at)
    for word, value in schema.items():
        place = f"{at}.{word}"
        wrong = _wrong(word, value)
        if wrong:
            raise InvalidRequest(f"{place}: {wrong}", param=place)
        for name, part in _inner(word, value):
            check(part, f"{place}.{name}".rstrip("."), depth + 1)


def normalised(schema: Json) -> Json:
    """Return the schema with such type names replaced by JSON's."""
    return _normalised(schema, depth=0)


def types_of(schema: Json) -> frozenset[str]:
    """The types that a value of a schema may have; all if it sets none."""
    if not isinstance(schema, dict):
        return TYPES
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset({declared}) & TYPES or TYPES
    if isinstance(declared, list):
        return frozenset(type_ for type_ in declared if isinstance(type_, str)) & TYPES or TYPES
    for word in ("anyOf", "oneOf"):
        branches = schema.get(word)
        if isinstance(branches, list) and branches:
            return frozenset[str]().union(*map(types_of, branches))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        return frozenset({"string"})
    return TYPES


def property_of(schema: Json, name: str) -> Json:
    """The schema of a property of an object; empty if it has none."""
    part = _member(_member(schema, "properties"), name)
    for _ in range(_REFERENCES_MAX):
        reference = _member(part, "$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        part = schema
        for word in reference.removeprefix("#/").split("/"):
            part = _member(part, word)
    return {} if part is None else part


def texts_of(schema: Json) -> frozenset[str]:
    """The strings allowed as a value; empty if it may be any."""
    values = _member(schema, "enum")
    if values is None and isinstance(schema, dict) and "const" in schema:
        values = [schema["const"]]
    listed = values if isinstance(values, list) else []
    return frozenset(value for value in listed if isinstance(value, str))


def _member(value: Json, name: str) -> Json:
    return value.get(name) if isinstance(value, dict) else None


def _wrong(word: str, value: Json) -> str | None:
    if word == "type":
        types = value if isinstance(value, list) and value else [value]
        wrong = [type_ for type_ in types if not isinstance(type_, str) or type_ not in TYPES]
        return f"{wrong[0]!r} is not a type; the types are {_TYPES_SHOWN}" if wrong else None
    if word in _MAPS and not isinstance(value, dict):
        return "must be an object"
    if word in _LISTS and (not isinstance(value, list) or not value):
        return "must be a list of schemas"
    if word == "enum" and not isinstance(value, list):
        return "must be a list"
    if word == "required" and not _are_names(value):
        return "must be a list of distinct names"
    if word in _COUNTS and (not _is_number(value) or not isinstance(value, int) or value < 0):
        return "must be a non-negative integer"
    if word in _NUMBERS and not _is_number(value):
        return "must be a number"
    if word in _TEXTS and not isinstance(value, str):
        return "must be a string"
    return None


def _are_names(value: Json) -> bool:
    if not isinstance(value, list):
        return False
    names = [name for name in value if isinstance(name, str)]
    return len(names) == len(value) == len(set(names))


def _is_number(value: Json) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _inner(word: str, value: Json) -> Iterator[tuple[str, Json]]:
    if word in _MAPS and isinstance(value, dict):
        yield from value.items()
    elif word in _LISTS and isinstance(value, list):
        yield from ((str(index), part) for index, part in enumerate(value))
    elif word in _SINGLE:
        yield "", value


def _normalised(schema: Json, depth: int) -> Json:
    if not isinstance(schema, dict) or depth > DEPTH_MAX:
        return schema
    made: dict[str, Json] = {}
    for word, value in schema.items():
        made[word] = value
        if word == "type":
            made[word] = _type(value)
        elif word in _MAPS and isinstance(value, dict):
            made[word] = {name: _normalised(part, depth + 1) for name, part in value.items()}
        elif word in _LISTS and isinstance(value, list):
            made[word] = [_normalised(part, depth + 1) for part in value]
        elif word in _SINGLE:
            made[word] = _normalised(value, depth + 1)
    return made


def _type(value: Json) -> Json:
    if isinstance(value, list):
        return [_type(part) for part in value]
    if isinstance(value, str) and value not in TYPES:
        return _ALIASES.get(value.lower(), value.lower() if value.lower() in TYPES else value)
    return value
