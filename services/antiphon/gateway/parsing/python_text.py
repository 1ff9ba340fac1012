"""Incremental Python literals, emitted as JSON."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from antiphon.gateway.parsing.tools.values import escaped

if TYPE_CHECKING:
    from antiphon.gateway.parsing.reader import Emit, Reader, Steps

DEPTH_MAX = 64
"""Maximum nesting depth of values."""

_WORD = re.compile(r"[\w+\-.]*")
_WORD_MAX = 64
_CLOSERS = {"[": "]", "(": ")"}
_NAMED = {
    "True": "true", "False": "false", "None": "null",
    "true": "true", "false": "false", "null": "null",
}  # fmt: skip
_LETTERS = {"'": re.compile(r"[^'\\]*"), '"': re.compile(r'[^"\\]*')}
_ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "0": "\0",
    "\\": "\\", "'": "'", '"': '"', "\n": "",
}  # fmt: skip
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


def literal(reader: Reader, emit: Emit, depth: int = 0) -> Steps[bool]:
    """Emit the next value; return False if it is malformed or truncated."""
    character = yield from reader.peek()
    if depth > DEPTH_MAX:
        return False
    if character in _LETTERS:
        return (yield from _string(reader, emit))
    if character in _CLOSERS:
        return (yield from _list(reader, emit, depth))
    if character == "{":
        return (yield from _dict(reader, emit, depth))
    word = _NAMED.get(word := (yield from reader.word(_WORD, _WORD_MAX))) or _number(word)
    emit(word)
    return bool(word)


def _list(reader: Reader, emit: Emit, depth: int) -> Steps[bool]:
    closer = _CLOSERS[(yield from reader.take(1))]
    emit("[")
    between = ""
    while True:
        yield from reader.space()
        if (yield from reader.starts(closer)):
            emit("]")
            return True
        emit(between)
        between = ", "
        if not (yield from literal(reader, emit, depth + 1)):
            return False
        yield from reader.space()
        if not (yield from reader.starts(",")) and (yield from reader.peek()) != closer:
            return False


def _dict(reader: Reader, emit: Emit, depth: int) -> Steps[bool]:
    yield from reader.take(1)
    emit("{")
    between = ""
    while True:
        yield from reader.space()
        if (yield from reader.starts("}")):
            emit("}")
            return True
        emit(between)
        between = ", "
        if not (yield from _key(reader, emit)):
            return False
        yield from reader.space()
        if not (yield from reader.starts(":")):
            return False
        emit(": ")
        yield from reader.space()
        if not (yield from literal(reader, emit, depth + 1)):
            return False
        yield from reader.space()
        if not (yield from reader.starts(",")) and (yield from reader.peek()) != "}":
            return False


def _key(reader: Reader, emit: Emit) -> Steps[bool]:
    """Emit a key as a string, since JSON keys are strings."""
    if (yield from reader.peek()) in _LETTERS:
        return (yield from _string(reader, emit))
    word = yield from reader.word(_WORD, _WORD_MAX)
    if word not in _NAMED and not _number(word):
        return False
    emit(f'"{word}"')
    return True


def _string(reader: Reader, emit: Emit) -> Steps[bool]:
    quote = yield from reader.take(1)
    emit('"')
    while True:
        yield from reader.run(_LETTERS[quote], lambda part: emit(escaped(part)))
        character = yield from reader.take(1)
        if character == quote:
            emit('"')
            return True
        if not character or not (yield from _escape(reader, emit)):
            return False


def _escape(reader: Reader, emit: Emit) -> Steps[bool]:
    """Emit an escape sequence; one without a meaning keeps its backslash."""
    character = yield from reader.take(1)
    if character in _HEX_DIGITS:
        digits = yield from reader.take(_HEX_DIGITS[character])
        if len(digits) < _HEX_DIGITS[character] or not re.fullmatch(r"[0-9a-fA-F]+", digits):
            return False
        code = int(digits, 16)
        # JSON writes surrogate pairs separately, as Python's short form does.
        emit(f"\\u{code:04x}" if code <= 0xFFFF else escaped(chr(min(code, 0x10FFFF))))
        return True
    emit(escaped(_ESCAPES.get(character, "\\" + character)))
    return bool(character)


def _number(word: str) -> str:
    """Convert a number to JSON; empty if it is not one."""
    if not word.isascii() or not any(letter.isdigit() for letter in word):
        return ""
    try:
        return str(int(word))
    except ValueError:
        pass
    try:
        number = float(word)
    except ValueError:
        return ""
    return repr(number) if math.isfinite(number) else ""
