"""Incremental JSON: values are emitted as they arrive.

Only brackets and quotes are tracked. Nothing else is validated: the consumer of a call's arguments
validates them anyway, and sees what the model generated.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from antiphon.gateway.parsing.reader import Emit, Reader, Steps

NAME_MAX = 256  # maximum length of a tool name or key, in characters as written

_CLOSERS = {"{": "}", "[": "]"}
_PLAIN = re.compile(r"[\s\w+\-.,:]*")
_SCALAR = re.compile(r"[\w+\-.]*")
_LETTERS = re.compile(r'[^"\\]*')
_NULL_MAX = 5


def value(reader: Reader, emit: Emit) -> Steps[bool]:
    """Emit the next JSON value; return False if it is malformed or truncated.

    A malformed value is emitted up to the error; the rest is not read.
    """
    closers: list[str] = []
    while True:
        if closers:
            yield from reader.run(_PLAIN, emit)
        character = yield from reader.peek()
        if character == '"':
            if not (yield from string(reader, emit)):
                return False
        elif character in _CLOSERS:
            closers.append(_CLOSERS[character])
            emit((yield from reader.take(1)))
            continue
        elif closers and character == closers[-1]:
            closers.pop()
            emit((yield from reader.take(1)))
        elif closers or not character:
            return False
        else:
            return (yield from _scalar(reader, emit))
        if not closers:
            return True


def string(reader: Reader, emit: Emit) -> Steps[bool]:
    """Emit a string with its quotes; return False if it is truncated. A quote comes next."""
    emit((yield from reader.take(1)))
    while True:
        yield from reader.run(_LETTERS, emit)
        character = yield from reader.peek()
        if character == '"':
            emit((yield from reader.take(1)))
            return True
        if not character:
            return False
        emit((yield from reader.take(2)))


def text(reader: Reader) -> Steps[str | None]:
    """Read a string and return its text; None if no valid string of that length comes next."""
    if (yield from reader.peek()) != '"':
        return None
    parts: list[str] = []
    if not (yield from string(reader, _up_to(parts, NAME_MAX))):
        return None
    return decoded("".join(parts))


def arguments(reader: Reader, emit: Emit) -> Steps[bool]:
    """Emit a value as `value` does, and an empty object for null."""
    if (yield from reader.peek()) != "n":
        return (yield from value(reader, emit))
    word = yield from reader.word(_SCALAR, _NULL_MAX)
    emit("{}" if word == "null" else word)
    return word == "null"


def decoded(written: str) -> str | None:
    """Decode a JSON string; None if it is invalid JSON or Unicode."""
    try:
        decoded: object = json.loads(written, strict=False)
        if not isinstance(decoded, str):
            return None
        decoded.encode()
    except ValueError:
        return None
    return decoded


def _scalar(reader: Reader, emit: Emit) -> Steps[bool]:
    seen = False

    def note(part: str) -> None:
        nonlocal seen
        seen = True
        emit(part)

    yield from reader.run(_SCALAR, note)
    return seen


def _up_to(parts: list[str], most: int) -> Emit:
    """Collect text; a longer text is cut so that it is no longer valid."""
    left = most + 2

    def collect(part: str) -> None:
        nonlocal left
        parts.append(part[:left])
        left -= len(parts[-1])

    return collect
