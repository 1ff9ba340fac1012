"""Python calls in a list: Llama 4, Olmo and LFM2."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from antiphon.gateway.parsing.json_text import NAME_MAX
from antiphon.gateway.parsing.reader import AFTER_CALLS, TRIM_MAX, WHITE, Emit, Reader, Steps, drop
from antiphon.gateway.parsing.tools import json_calls
from antiphon.gateway.parsing.tools.format import CallOutcome, ToolFormat, after, framed_format
from antiphon.gateway.parsing.tools.values import escaped, quoted

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.gateway.parsing.events import EventSink

_NAME = re.compile(r"[\w.\-]*")
_KEY = re.compile(r"\w*")
_DEPTH_MAX = 64  # maximum nesting depth of values

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


def _calls(reader: Reader, out: EventSink) -> Steps[CallOutcome]:
    """Read calls up to the closing bracket, after the opening one."""
    outcome = CallOutcome.NOTHING
    while True:
        yield from reader.space()
        if (yield from reader.starts("]")):
            return outcome
        name = yield from reader.word(_NAME, NAME_MAX)
        if not name or not (yield from reader.starts("(")):
            return CallOutcome.BROKEN if outcome is CallOutcome.DONE else CallOutcome.NOTHING
        complete = yield from _arguments(reader, out.begin(reader, name))
        out.end(reader, complete=complete)
        if not complete:
            return CallOutcome.BROKEN
        outcome = CallOutcome.DONE
        yield from reader.space()
        yield from reader.starts(",")


def _arguments(reader: Reader, emit: Emit) -> Steps[bool]:
    def argument(between: str) -> Steps[bool]:
        key = yield from reader.word(_KEY, NAME_MAX)
        yield from reader.space()
        if not key or not (yield from reader.starts("=")):
            return False
        emit(f"{between}{quoted(key)}: ")
        yield from reader.space()
        return (yield from _literal(reader, emit))

    emit("{")
    complete = yield from _items(reader, ")", argument)
    if complete:
        emit("}")
    return complete


def _items(reader: Reader, closer: str, read_item: Callable[[str], Steps[bool]]) -> Steps[bool]:
    """Read items up to the closer; each gets the separator that it emits before itself."""
    between = ""
    while True:
        yield from reader.space()
        if (yield from reader.starts(closer)):
            return True
        if not (yield from read_item(between)):
            return False
        between = ", "
        yield from reader.space()
        if not (yield from reader.starts(",")) and (yield from reader.peek()) != closer:
            return False


def _read(reader: Reader, out: EventSink) -> Steps[None]:
    reader.keep()
    yield from reader.word(WHITE, TRIM_MAX)
    framed_ = yield from reader.starts("<|python_start|>")
    listed = yield from reader.starts("[")
    outcome = CallOutcome.NOTHING
    if listed:
        outcome = yield from _calls(reader, out)
    if framed_ and outcome is CallOutcome.DONE:
        yield from reader.space()
        yield from reader.starts("<|python_end|>")
    if out.settle(reader):
        yield from reader.rest(out.content)
    elif outcome is CallOutcome.DONE:
        yield from reader.until(AFTER_CALLS, out.content)
    else:
        yield from reader.rest(drop)


def _lfm2(reader: Reader, out: EventSink) -> Steps[CallOutcome]:
    yield from reader.space()
    if (yield from reader.peek()) == "{":
        return (yield from json_calls.calls_in_list(reader, out))
    return (yield from _calls(reader, out))


def _literal(reader: Reader, emit: Emit, depth: int = 0) -> Steps[bool]:
    """Emit the next value; return False if it is malformed or truncated."""
    character = yield from reader.peek()
    if depth > _DEPTH_MAX:
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
    def value(between: str) -> Steps[bool]:
        emit(between)
        return (yield from _literal(reader, emit, depth + 1))

    closer = _CLOSERS[(yield from reader.take(1))]
    emit("[")
    complete = yield from _items(reader, closer, value)
    if complete:
        emit("]")
    return complete


def _dict(reader: Reader, emit: Emit, depth: int) -> Steps[bool]:
    def entry(between: str) -> Steps[bool]:
        emit(between)
        if not (yield from _key(reader, emit)):
            return False
        yield from reader.space()
        if not (yield from reader.starts(":")):
            return False
        emit(": ")
        yield from reader.space()
        return (yield from _literal(reader, emit, depth + 1))

    yield from reader.take(1)
    emit("{")
    complete = yield from _items(reader, "}", entry)
    if complete:
        emit("}")
    return complete


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


PYTHONIC = ToolFormat(names=("pythonic",), example='[f(a=1), g(b="x")]', read=_read, special=True)
LFM2 = framed_format(
    ("lfm2",),
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    after("[", _lfm2),
    example="<|tool_call_start|>[f(a=1)]<|tool_call_end|>",
)
