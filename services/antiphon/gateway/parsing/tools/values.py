"""Arguments written as delimited text, emitted as JSON by the tool's schema.

A value that can only be a string is emitted as it arrives. Any other must be complete before its
type is known.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.parsing.tools.schema import TYPES, property_of, texts_of, types_of

if TYPE_CHECKING:
    from antiphon.gateway.parsing.reader import Emit, Marks, Reader, Steps
    from antiphon.wire.schemas import Json

_STRING = frozenset({"string"})
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NULLS = frozenset({"null", "none"})


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
        types = _types(schema, text=text)
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


def _types(schema: Json, *, text: bool | None) -> frozenset[str]:
    if text is None:
        return types_of(schema)
    return _STRING if text else TYPES


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True
