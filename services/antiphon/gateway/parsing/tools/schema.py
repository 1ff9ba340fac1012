"""Tool schemas: validation of their form, and type names of databases and programming languages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable

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


def checked_schema(schema: Json, at: str, depth: int = 0) -> Json:
    """Return the schema with JSON's names of types, if its form is that of Draft 2020-12.

    Raises:
        InvalidRequest: It is not; `param` has the path of the error, which starts with `at`.
    """
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{at}: a schema must be an object, true or false", param=at)
    if depth > DEPTH_MAX:
        raise InvalidRequest(f"{at}: the schema is nested too deeply", param=at)
    return {word: _checked_value(word, schema[word], f"{at}.{word}", depth + 1) for word in schema}


def _checked_value(word: str, value: Json, at: str, depth: int) -> Json:
    if word == "type":
        return _checked_type(value, at)
    if word in _SINGLE:
        return checked_schema(value, at, depth)
    is_valid, wrong = _FORMS.get(word, (None, ""))
    if is_valid is not None and not is_valid(value):
        raise InvalidRequest(f"{at}: {wrong}", param=at)
    if word in _MAPS and isinstance(value, dict):
        return {name: checked_schema(value[name], f"{at}.{name}", depth) for name in value}
    if word in _LISTS and isinstance(value, list):
        return [checked_schema(part, f"{at}.{n}", depth) for n, part in enumerate(value)]
    return value


def _checked_type(value: Json, at: str) -> Json:
    named = json_type(value)
    for type_ in named if isinstance(named, list) and named else [named]:
        if not isinstance(type_, str) or type_ not in TYPES:
            text = f"{at}: {type_!r} is not a type; the types are {_TYPES_SHOWN}"
            raise InvalidRequest(text, param=at)
    return named


def json_type(value: Json) -> Json:
    """Replace names of types of databases and programming languages by JSON's."""
    if isinstance(value, list):
        return [json_type(part) for part in value]
    if isinstance(value, str) and value not in TYPES:
        return _ALIASES.get(value.lower(), value.lower() if value.lower() in TYPES else value)
    return value


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
