"""Arguments written as delimited text, emitted as JSON by the tool's schema.

A value that can only be a string is emitted as it arrives. Any other must be complete before its
type is known.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.parsing.tools.tool import TYPES

if TYPE_CHECKING:
    from antiphon.gateway.parsing.reader import Emit, Marks, Reader, Steps
    from antiphon.wire.schemas import Json

_STRING = frozenset({"string"})
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NULLS = frozenset({"null", "none"})
_REFERENCES_MAX = 8


class ArgumentsWriter:
    def __init__(self, schema: Json, emit: Emit) -> None:
        self._schema = schema
        self._emit = emit
        self._begun = False

    def value(
        self, reader: Reader, name: str, ends: Marks, *, text: bool | None = None
    ) -> Steps[bool]:
        """Read and emit a value up to one of the delimiters; return False if it is truncated.

        `text` is whether it is a string or JSON; None to use the schema.
        """
        self._emit(f"{', ' if self._begun else '{'}{quoted(name)}: ")
        self._begun = True
        schema = property_of(self._schema, name)
        types = types_of(schema) if text is None else _STRING if text else TYPES
        texts = texts_of(schema)
        if types == _STRING and not texts:
            return (yield from self._string(reader, ends))
        parts: list[str] = []
        if (yield from reader.until(ends, parts.append)) is None:
            return False
        self._emit(converted("".join(parts), types, texts))
        return True

    def close(self) -> None:
        self._emit("}" if self._begun else "{}")

    def _string(self, reader: Reader, ends: Marks) -> Steps[bool]:
        self._emit('"')
        mark = yield from reader.until(ends, lambda part: self._emit(escaped(part)))
        if mark is None:
            return False
        self._emit('"')
        return True


def converted(text: str, types: frozenset[str], texts: frozenset[str] = frozenset()) -> str:
    """Convert to JSON of one of these types, or to a string if it is none of them.

    White space around one of the `texts` is removed if the value must be one of them.
    """
    word = text.strip()
    if text not in texts and word in texts:
        return quoted(word)
    lower = word.lower()
    if "boolean" in types and lower in {"true", "false"}:
        return lower
    if "null" in types and lower in _NULLS:
        return "null"
    if "number" in types and _NUMBER.fullmatch(word):
        return word
    if "integer" in types and _INTEGER.fullmatch(word):
        return word
    if types & {"object", "array"} and word[:1] in {"{", "["} and _is_json(word):
        return word
    if types == TYPES and word[:1] == '"' and _is_json(word):
        return word
    return quoted(text)


def quoted(text: str) -> str:
    return f'"{escaped(text)}"'


def escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


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
