"""How a value that SGLang takes is written here."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import msgspec

from antiphon.config.errors import ConfigError
from antiphon.config.fields import fields
from antiphon.config.grammar import WHITESPACE_MAX
from antiphon.config.parsing import ABSENT_REASONING_PARSERS, ABSENT_TOOL_PARSERS
from antiphon.config.quantization import TORCHAO, Quantize


class Written(msgspec.Struct, frozen=True):
    """An SGLang value as we write it."""

    text: str | None
    implied: Mapping[str, str] = {}
    """By path: what it needs beside, where nothing else says."""


def _cache_dtype(text: str) -> Written:
    """Four bits are not built; the model's own format has two names."""
    if text == "fp4_e2m1":
        raise ConfigError(
            f"--kv-cache-dtype {text}: refused: it is not built yet, only fp8_e4m3 and fp8_e5m2 are"
        )
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


def _quantization(text: str) -> Written:
    """SGLang's methods, of which some are not built."""
    if text not in {method.value for method in Quantize}:
        raise ConfigError(
            f"--quantization {text}: refused: it is not built yet: there are {', '.join(Quantize)}"
        )
    return Written(text)


def _torchao(text: str) -> Written:
    """SGLang's shorthands for configurations of torchao."""
    known = {method.removeprefix("torchao-"): method for method in TORCHAO}
    if text == "int4wo-256":
        raise ConfigError(
            f"--torchao-config {text}: refused: torchao's int4 on a CPU has groups of 32, 64 or 128"
        )
    if text and text not in known:
        raise ConfigError(
            f"--torchao-config {text}: refused: it is not built yet: there are {', '.join(known)}"
        )
    return Written(known.get(text))


def _reasoning_parser(text: str) -> Written:
    return _parser("--reasoning-parser", text, ABSENT_REASONING_PARSERS)


def _tool_parser(text: str) -> Written:
    return _parser("--tool-call-parser", text, ABSENT_TOOL_PARSERS)


def _parser(flag: str, text: str, absent: frozenset[str]) -> Written:
    """A name of SGLang's: refused as such if its format is not built."""
    if text in absent:
        raise ConfigError(f"{flag} {text}: refused: this format is not built")
    return Written(text)


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
    "impl": _impl,
    "lower": _lower,
    "off": _off,
    "on": _on,
    "quantization": _quantization,
    "reasoning_parser": _reasoning_parser,
    "tool_parser": _tool_parser,
    "torchao": _torchao,
    "whitespace": _whitespace,
}
"""How an SGLang value is written here, by the word after the path."""
