"""A configured value with its source, and the errors for invalid ones."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING

import msgspec

from antiphon.config.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from antiphon.config.fields import SettingField

Value = str | int | float | bool | None


class SourcedValue(msgspec.Struct, frozen=True):
    value: Value
    source: str


Layer = dict[str, SourcedValue]
"""Values of one source, by path."""


def parse(text: str, field: SettingField, source: str) -> SourcedValue:
    """Convert text to a value of the field's type. `null` unsets an optional field."""
    try:
        value: object = msgspec.convert(_literal(text, field), field.annotation, strict=False)
    except msgspec.ValidationError as error:
        raise refusal(field, text, source) from error
    return SourcedValue(msgspec.to_builtins(value), source)


def refusal(field: SettingField, value: object, source: str) -> ConfigError:
    """The error for an invalid value: one line with its source and the allowed values."""
    shown = "***" if field.secret else repr(value)
    return ConfigError(f"{source}: {field.path} = {shown}: must be {describe(field)}")


def describe(field: SettingField) -> str:
    """Describe a field's allowed values: `an integer >= 1 (tokens), or null`."""
    words = f"one of {', '.join(field.choices)}" if field.choices else _ARTICLED[field.kind]
    if field.bounds:
        words += f" {field.bounds}"
    if field.unit:
        words += f" ({field.unit})"
    return f"{words}, or null" if field.optional else words


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean x?` if `name` is a misspelled x, else empty.

    A different word of a known name is not a misspelling but another meaning:
    `--disable-mixed-chunk` is as similar to `--disable-radix-cache` as a misspelling would be.
    """
    names = {other: _words(other) for other in known}
    vocabulary = {word for words in names.values() for word in words}
    typed = _words(name)
    same = [other for other, words in names.items() if _misspelled(typed, words, vocabulary)]
    found = difflib.get_close_matches(name, same, n=1, cutoff=0.0)
    return f"; did you mean {found[0]}?" if found else ""


_SPELLED_ALIKE = 0.7
"""Similarity of a word and its misspellings: `prot` and `port` have 0.75, `min` and `max` 0.33."""


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[-_.]+", name.casefold()) if word]


def _misspelled(typed: list[str], words: list[str], vocabulary: set[str]) -> bool:
    """Whether `typed` has the same words, except for their spelling or separators."""
    if "".join(typed) == "".join(words):
        return True
    return len(typed) == len(words) and all(
        one.removesuffix("s") == other.removesuffix("s")
        or (
            one not in vocabulary
            and difflib.SequenceMatcher(None, one, other).ratio() >= _SPELLED_ALIKE
        )
        for one, other in zip(typed, words, strict=True)
    )


def _literal(text: str, field: SettingField) -> int | float | str:
    """Parse a number; Python accepts more forms than msgspec: `.5`, `+1`."""
    try:
        return _NUMBERS.get(field.kind, str)(text)
    except ValueError:
        return text


_NUMBERS = {"integer": int, "number": float}
_ARTICLED = {"integer": "an integer", "number": "a number", "text": "text", "boolean": "a boolean"}
