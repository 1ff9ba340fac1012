"""How a value that SGLang takes is written here."""

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
    """An SGLang value as we write it."""

    text: str | None
    implied: Mapping[str, str] = {}
    """By path: what it needs beside, where nothing else says."""


def _cache_dtype(text: str) -> TranslatedValue:
    """The model's own format has two names."""
    return TranslatedValue({"bf16": "bfloat16"}.get(text, text))


def _checksum(text: str) -> TranslatedValue:
    """SGLang's flag without a value compares with the hub's model of the same name."""
    return TranslatedValue(text or "hub")


def _chunk(text: str) -> TranslatedValue:
    """A chunk above our default step raises the step."""
    if not text.isdecimal():
        return TranslatedValue(text)
    step = fields()["batching.tokens_max"].default
    assert isinstance(step, int)
    return TranslatedValue(text, {"batching.tokens_max": str(max(step, int(text)))})


def _deterministic(_: str) -> TranslatedValue:
    """SGLang's switch also gives a seed to requests that name none."""
    return TranslatedValue("true", {"model.random_seed": "42"})


def _dtype(text: str) -> TranslatedValue:
    return TranslatedValue({"half": "float16", "float": "float32"}.get(text, text))


def _impl(text: str) -> TranslatedValue:
    """What SGLang calls its own layers are ours here."""
    return TranslatedValue({"sglang": "antiphon"}.get(text, text))


def _lower(text: str) -> TranslatedValue:
    return TranslatedValue(text.lower())


def _off(_: str) -> TranslatedValue:
    """A switch of SGLang's that turns one of ours off."""
    return TranslatedValue("false")


def _on(_: str) -> TranslatedValue:
    """A switch of SGLang's that turns one of ours on."""
    return TranslatedValue("true")


def _plain(text: str) -> TranslatedValue:
    return TranslatedValue(text)


def _torchao(text: str) -> TranslatedValue:
    """SGLang's shorthands for configurations of torchao; empty: none."""
    return TranslatedValue(f"torchao-{text}" if text else None)


def _hidden_mode(text: str) -> TranslatedValue:
    """Hidden states are there or not."""
    return TranslatedValue({"full": "true"}.get(text, text))


_NEVER = 2**64 - 1
"""No priority exceeds another by more: they are of 64 bits."""


def _never(_: str) -> TranslatedValue:
    return TranslatedValue(str(_NEVER))


def _whitespace(text: str) -> TranslatedValue:
    """White space that a pattern allows: all of JSON's up to a bound, or JSON on one line.

    A pattern says what may stand between two parts, and nothing has to: less than it allows is
    within it. What is written on one line has single spaces, so these have to be allowed.
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
"""How an SGLang value is written here, by the word after the path."""


def shown(row: SglangArgument, value: Value) -> Value:
    """SGLang's value of an argument here.

    Args:
        row: The argument.
        value: Of its setting, if it sets one.

    Returns:
        What SGLang would say of a server that does the same; of a refused argument, the value with
        which it changes nothing.
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
        return neutral  # `null`, a mode of disaggregation, is a word
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
    "whitespace": lambda _: None,  # the bound says it
}
"""The way back from our value, by the same words; of others it is the same value."""
