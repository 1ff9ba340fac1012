"""How a value that SGLang takes is written here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from antiphon.config.fields import fields


class Written(msgspec.Struct, frozen=True):
    """An SGLang value as we write it."""

    text: str | None
    implied: Mapping[str, str] = {}
    """By path: what it needs beside, where nothing else says."""


def _chunk(text: str) -> Written:
    """-1 leaves the step as the only limit; a chunk above our default step raises the step."""
    if not text.isdecimal():
        return Written("null" if text == "-1" else text)
    step = fields()["batching.tokens_max"].default
    assert isinstance(step, int)
    return Written(text, {"batching.tokens_max": str(max(step, int(text)))})


def _dtype(text: str) -> Written:
    return Written({"half": "float16", "float": "float32"}.get(text, text))


def _lower(text: str) -> Written:
    return Written(text.lower())


def _plain(text: str) -> Written:
    return Written(text)


def _trace(_: str) -> Written:
    """SGLang's switch has a default collector; ours is the OTLP/HTTP port of the same host."""
    return Written(None, {"telemetry.otlp_endpoint": "http://localhost:4318"})


def _http(text: str) -> Written:
    return Written(text if "://" in text else f"http://{text}")


SPELLINGS: Mapping[str, Callable[[str], Written]] = {
    "": _plain,
    "chunk": _chunk,
    "dtype": _dtype,
    "http": _http,
    "lower": _lower,
    "trace": _trace,
}
"""How an SGLang value is written here, by the word after the path."""
