"""Translates values of SGLang's arguments to settings, and settings back."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, cast

import msgspec

from antiphon.config.errors import ConfigError
from antiphon.config.fields import fields
from antiphon.config.sglang.arguments import PARTLY_HELD
from antiphon.config.sourced_value import Value
from antiphon.config.worker import WHITESPACE_MAX

if TYPE_CHECKING:
    from antiphon.config.sglang.arguments import SglangArgument


class TranslatedValue(msgspec.Struct, frozen=True):
    """The text for a setting, and by path the texts that it implies unless they are set."""

    text: str | None
    implied: Mapping[str, str] = {}


class Translation(msgspec.Struct, frozen=True):
    """The way of a value from SGLang's argument to a setting, and back."""

    forward: Callable[[str], TranslatedValue]
    back: Callable[[Value], Value] = lambda value: value


def _renamed(**names: str) -> Callable[[str], TranslatedValue]:
    return lambda text: TranslatedValue(names.get(text, text))


def _always(text: str, implied: Mapping[str, str] = {}) -> Callable[[str], TranslatedValue]:
    return lambda _: TranslatedValue(text, implied)


def _chunk(text: str) -> TranslatedValue:
    """A chunk above the default step size raises the step size."""
    if not text.isdecimal():
        return TranslatedValue(text)
    step = fields()["batching.tokens_max"].default
    assert isinstance(step, int)
    return TranslatedValue(text, {"batching.tokens_max": str(max(step, int(text)))})


_NEVER = 2**64 - 1
"""No difference of priorities exceeds it: they have 64 bits."""


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


_TORCHAO = "torchao-"
_JSON_WHITE = frozenset({" ", r"\n", r"\r", r"\t"})
_WHITESPACE = re.compile(
    r"(?P<allowed>\[(?: |\\[nrts])+\]| |\\s)(?:\*|\?|\{0?,(?P<most>\d{1,9})\})"
)

TRANSLATIONS: Mapping[str, Translation] = {
    "": Translation(TranslatedValue),
    "cache_dtype": Translation(_renamed(bf16="bfloat16")),
    # The flag without a value compares with the model of the same name on the hub.
    "checksum": Translation(lambda text: TranslatedValue(text or "hub")),
    "chunk": Translation(_chunk),
    # SGLang's switch also sets a seed for requests without one.
    "deterministic": Translation(
        _always("true", {"model.random_seed": "42"}), lambda value: value is True
    ),
    "dtype": Translation(_renamed(half="float16", float="float32")),
    "hidden_mode": Translation(
        _renamed(full="true"), lambda value: "full" if value is True else None
    ),
    # SGLang's name for its own layers means Antiphon's layers here.
    "impl": Translation(
        _renamed(sglang="antiphon"), lambda value: "sglang" if value == "antiphon" else value
    ),
    "lower": Translation(
        lambda text: TranslatedValue(text.lower()), lambda value: str(value).lower()
    ),
    "never": Translation(_always(str(_NEVER)), lambda value: value == _NEVER),
    "off": Translation(_always("false"), lambda value: value is False),
    "on": Translation(_always("true"), lambda value: value is True),
    "torchao": Translation(
        lambda text: TranslatedValue(f"{_TORCHAO}{text}" if text else None),
        lambda value: str(value).removeprefix(_TORCHAO) if str(value).startswith(_TORCHAO) else "",
    ),
    "whitespace": Translation(_whitespace, lambda _: None),  # expressed by the limit
}
"""Translations of SGLang values, by the word after the path in `sglang_flags.tsv`."""


def shown(row: SglangArgument, value: Value) -> Value:
    """The argument's value for a setting's; for a rejected argument, one that has no effect."""
    if row.path is not None:
        return TRANSLATIONS[row.detail].back(value)
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
