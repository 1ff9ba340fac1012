"""How a value that SGLang takes is written here."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import msgspec

from antiphon.config.errors import ConfigError
from antiphon.config.fields import fields
from antiphon.config.grammar import WHITESPACE_MAX


class Written(msgspec.Struct, frozen=True):
    """An SGLang value as we write it."""

    text: str | None
    implied: Mapping[str, str] = {}
    """By path: what it needs beside, where nothing else says."""


def _cache_dtype(text: str) -> Written:
    """The model's own format has two names."""
    return Written({"bf16": "bfloat16"}.get(text, text))


def _checksum(text: str) -> Written:
    """SGLang's flag without a value compares with the hub's model of the same name."""
    return Written(text or "hub")


def _chunk(text: str) -> Written:
    """A chunk above our default step raises the step."""
    if not text.isdecimal():
        return Written(text)
    step = fields()["batching.tokens_max"].default
    assert isinstance(step, int)
    return Written(text, {"batching.tokens_max": str(max(step, int(text)))})


def _deterministic(_: str) -> Written:
    """SGLang's switch also gives a seed to requests that name none."""
    return Written("true", {"model.random_seed": "42"})


def _dtype(text: str) -> Written:
    return Written({"half": "float16", "float": "float32"}.get(text, text))


def _impl(text: str) -> Written:
    """What SGLang calls its own layers are ours here."""
    return Written({"sglang": "antiphon"}.get(text, text))


def _lower(text: str) -> Written:
    return Written(text.lower())


def _off(_: str) -> Written:
    """A switch of SGLang's that turns one of ours off."""
    return Written("false")


def _on(_: str) -> Written:
    """A switch of SGLang's that turns one of ours on."""
    return Written("true")


def _plain(text: str) -> Written:
    return Written(text)


def _torchao(text: str) -> Written:
    """SGLang's shorthands for configurations of torchao; empty: none."""
    return Written(f"torchao-{text}" if text else None)


def _hidden_mode(text: str) -> Written:
    """Hidden states are there or not."""
    return Written({"full": "true"}.get(text, text))


def _never(_: str) -> Written:
    """No priority exceeds another by more: they are of 64 bits."""
    return Written(str(2**64 - 1))


def _whitespace(text: str) -> Written:
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
            f"--constrained-json-whitespace-pattern {text}: refused: what can be held is white "
            r"space of which the space is one, with *, ? or a bound: [ \n\r\t]{0,8}, [\n\t ]*, ' ?'"
        )
    if not allowed >= _JSON_WHITE:
        return Written(None, {"grammar.compact_json": "true"})
    return Written(None if text.endswith("*") else str(min(most, WHITESPACE_MAX)))


_JSON_WHITE = frozenset({" ", r"\n", r"\r", r"\t"})
_WHITESPACE = re.compile(
    r"(?P<allowed>\[(?: |\\[nrts])+\]| |\\s)(?:\*|\?|\{0?,(?P<most>\d{1,9})\})"
)

SPELLINGS: Mapping[str, Callable[[str], Written]] = {
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
