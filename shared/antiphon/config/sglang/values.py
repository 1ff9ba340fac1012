"""Translates values of SGLang's arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, cast

import msgspec

from antiphon.config.errors import ConfigError
from antiphon.config.fields import fields
from antiphon.config.grammar import WHITESPACE_MAX
from antiphon.config.sglang.arguments import PARTLY_HELD

if TYPE_CHECKING:
    from antiphon.config.sglang.arguments import SglangArgument
    from antiphon.config.sourced_value import Value


class TranslatedValue(msgspec.Struct, frozen=True):
    """The translation of an SGLang value."""

    text: str | None
    implied: Mapping[str, str] = {}
    """By path: values that it implies, unless they are set otherwise."""


def _cache_dtype(text: str) -> TranslatedValue:
    """SGLang has two names for bfloat16."""
    return TranslatedValue({"bf16": "bfloat16"}.get(text, text))


def _checksum(text: str) -> TranslatedValue:
    """SGLang's flag without a value compares with the model of the same name on the hub."""
    return TranslatedValue(text or "hub")


def _chunk(text: str) -> TranslatedValue:
    """A chunk above the default step size raises the step size."""
    if not text.isdecimal():
        return TranslatedValue(text)
    step = fields()["batching.tokens_max"].default
    assert isinstance(step, int)
    return TranslatedValue(text, {"batching.tokens_max": str(max(step, int(text)))})


def _deterministic(_: str) -> TranslatedValue:
    """SGLang's switch also sets a seed for requests without one."""
    return TranslatedValue("true", {"model.random_seed": "42"})


def _dtype(text: str) -> TranslatedValue:
    return TranslatedValue({"half": "float16", "float": "float32"}.get(text, text))


def _impl(text: str) -> TranslatedValue:
    """SGLang's name for its own layers means Antiphon's layers here."""
    return TranslatedValue({"sglang": "antiphon"}.get(text, text))


def _lower(text: str) -> TranslatedValue:
    return TranslatedValue(text.lower())


def _off(_: str) -> TranslatedValue:
    """A switch of SGLang's that disables one of Antiphon's."""
    return TranslatedValue("false")


def _on(_: str) -> TranslatedValue:
    """A switch of SGLang's that enables one of Antiphon's."""
    return TranslatedValue("true")


def _plain(text: str) -> TranslatedValue:
    return TranslatedValue(text)


def _torchao(text: str) -> TranslatedValue:
    """SGLang's short names of torchao configurations; empty: none."""
    return TranslatedValue(f"torchao-{text}" if text else None)


def _hidden_mode(text: str) -> TranslatedValue:
    """Hidden states are either enabled or not."""
    return TranslatedValue({"full": "true"}.get(text, text))


_NEVER = 2**64 - 1
"""No difference of priorities exceeds it: they have 64 bits."""


def _never(_: str) -> TranslatedValue:
    return TranslatedValue(str(_NEVER))


def _whitespace(text: str) -> TranslatedValue:
    """White space that a pattern allows: all of JSON's up to a limit, or JSON on one line.

    A pattern sets what may be between two elements, and none of it is required: allowing less is
    within it. JSON on one line has single spaces, so the pattern must allow these.
    """
    match = _WHITESPACE.fullmatch(text)
    written = set(re.findall(r"\\.| ", match["allowed"])) if match else set[str]()
    allowed = written | _JSON_WHITE if r"\s" in written else written
    most = int(match["most"] or "1") if match else 0
    if " " not in allowed or most == 0:
        raise ConfigError(
            f"--constrained-json-whitespace-pattern {text}: refused: must be a set of white space "
            r"with the space in it and *, ? or a bound: [ \n\r\t]{0,8}, [\n\t ]*, ' ?'"
        )
    if not allowed >= _JSON_WHITE:
        return TranslatedValue(None, {"grammar.compact_json": "true"})
    return TranslatedValue(None if text.endswith("*") else str(min(most, WHITESPACE_MAX)))


_JSON_WHITE = frozenset({" ", r"\n", r"\r", r"\t"})
_WHITESPACE = re.compile(
    r"(?P<allowed>\[(?: |\\[nrts])+\]| |\\s)(?:\*|\?|\{0?,(?P<most>\d{1,9})\})"
)

TRANSLATIONS: Mapping[str, Callable[[str], TranslatedValue]] = {
    "": _plain,
    "cache_dtype": _cache_dtype,
    "checksum": _checksum,
    "chunk": _chunk,
    "deterministic": _deterministic,
    "dtype": _dtype,
    "hidden_mode": _hidden_mode,
    "impl": _impl,
    "lower": _lower,
    "never": _never,
    "off": _off,
    "on": _on,
    "torchao": _torchao,
    "whitespace": _whitespace,
}
"""Translations of SGLang values, by the word after the path."""


def shown(row: SglangArgument, value: Value) -> Value:
    """The value of an SGLang argument that corresponds to a setting.

    Args:
        row: The argument.
        value: The value of its setting, if it sets one.

    Returns:
        The value in SGLang for the same behavior; for a rejected argument, the value with which it
        has no effect.
    """
    if row.path is not None:
        back = _BACK.get(row.detail)
        return value if back is None else back(value)
    if row.verdict == "settled":
        return row.takes == "switch" and row.detail not in (*PARTLY_HELD, "no_effect")
    if row.takes == "switch":
        return False
    if not row.neutral:
        return None
    neutral = row.neutral[-1]
    if row.takes.startswith(("text", "json")):
        return neutral  # `null` is text here: a mode of disaggregation
    return cast("Value", json.loads(neutral))


def _torchao_back(value: Value) -> str:
    text = str(value)
    return text.removeprefix("torchao-") if text.startswith("torchao-") else ""


_BACK: Mapping[str, Callable[[Value], Value]] = {
    "deterministic": lambda value: value is True,
    "hidden_mode": lambda value: "full" if value is True else None,
    "impl": lambda value: "sglang" if value == "antiphon" else value,
    "lower": lambda value: str(value).lower(),
    "never": lambda value: value == _NEVER,
    "off": lambda value: value is False,
    "on": lambda value: value is True,
    "torchao": _torchao_back,
    "whitespace": lambda _: None,  # expressed by the limit
}
"""Reverse translations, by the same words; other values are the same in both."""
