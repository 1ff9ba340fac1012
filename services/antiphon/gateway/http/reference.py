"""Writes docs/reference/http.md: every field of every body, from the structs that decode it.

python -m antiphon.gateway.http.reference
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec

from antiphon.config.markdown import table
from antiphon.gateway.http.anthropic import unsupported as anthropic
from antiphon.gateway.http.anthropic.schema import CountBody, MessagesBody
from antiphon.gateway.http.native import control, parsing
from antiphon.gateway.http.native import endpoints as generation
from antiphon.gateway.http.native import unsupported as native
from antiphon.gateway.http.native.encode import EncodeBody
from antiphon.gateway.http.native.schema import GenerateBody
from antiphon.gateway.http.ollama import models as library
from antiphon.gateway.http.ollama import unsupported as ollama
from antiphon.gateway.http.ollama.embeddings import OllamaEmbedBody, OllamaEmbeddingBody
from antiphon.gateway.http.ollama.schema import OllamaChatBody, OllamaGenerateBody
from antiphon.gateway.http.openai import unsupported as openai
from antiphon.gateway.http.openai.classify import ClassifyBody
from antiphon.gateway.http.openai.embeddings import EmbeddingBody
from antiphon.gateway.http.openai.rerank import RerankBody
from antiphon.gateway.http.openai.responses.schema import ResponsesBody
from antiphon.gateway.http.openai.responses.unsupported import RESPONSES
from antiphon.gateway.http.openai.schema import ChatBody, CompletionBody
from antiphon.gateway.http.openai.score import ScoreBody
from antiphon.gateway.http.openai.tokenize import DetokenizeBody, TokenizeBody

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from antiphon.gateway.http.core.fields import UnsupportedField

PAGE = Path(__file__).parents[4] / "docs" / "reference" / "http.md"

Schema = dict[str, object]

_WIDE = 2**31 - 1

BODIES: tuple[tuple[str, type[msgspec.Struct], Mapping[str, UnsupportedField]], ...] = (
    ("/v1/chat/completions", ChatBody, openai.CHAT),
    ("/v1/completions", CompletionBody, openai.COMPLETION),
    ("/v1/messages", MessagesBody, anthropic.MESSAGES),
    ("/v1/messages/count_tokens", CountBody, anthropic.COUNT),
    ("/v1/responses", ResponsesBody, RESPONSES),
    ("/v1/tokenize", TokenizeBody, {}),
    ("/v1/detokenize", DetokenizeBody, {}),
    ("/v1/score", ScoreBody, {}),
    ("/v1/embeddings", EmbeddingBody, openai.EMBEDDING),
    ("/v1/classify", ClassifyBody, openai.EMBEDDING),
    ("/v1/rerank", RerankBody, openai.EMBEDDING),
    ("/encode", EncodeBody, native.ENCODE),
    ("/classify", EncodeBody, native.ENCODE),
    ("/generate", GenerateBody, native.GENERATE),
    ("/api/chat", OllamaChatBody, ollama.CHAT),
    ("/api/generate", OllamaGenerateBody, ollama.GENERATE),
    ("/api/embed", OllamaEmbedBody, ollama.EMBED),
    ("/api/embeddings", OllamaEmbeddingBody, {}),
    ("/api/show", library.ShowBody, {}),
    ("/open_session", generation.OpenSession, {}),
    ("/close_session", generation.CloseSession, {}),
    ("/abort_request", control.AbortBody, {}),
    ("/pause_generation", control.PauseBody, {}),
    ("/continue_generation", control.ContinueBody, {}),
    ("/update_weight_version", control.VersionBody, {}),
    ("/parse_function_call", parsing.ParseBody, {}),
    ("/separate_reasoning", parsing.SeparateBody, {}),
)
"""What is posted, and where; a body that is not here fails a test."""

_HEAD = """\
# Bodies of the HTTP APIs

Made by `make docs` from the structs that decode them; `/openapi.json` is, too. How the APIs behave:
[http.md](../http.md). A null is as good as a field that is left out.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *_parts()]).rstrip() + "\n"


def _parts() -> Iterator[str]:
    _, components = msgspec.json.schema_components([body for _, body, _ in BODIES])
    parts = {name: cast("Schema", part) for name, part in components.items()}
    met: dict[str, None] = {}
    for path, body, refused in BODIES:
        yield f"## POST {path}\n"
        yield from _fields(parts[body.__name__], met)
        if refused:
            yield "Refused with 400 and this reason, unless the value asks for nothing:\n"
            rows = [(f"`{name}`", why.reason) for name, why in sorted(refused.items())]
            yield from table(("field", "reason"), rows)
            yield ""
    yield "## Parts of bodies\n"
    shown: set[str] = set()
    while left := [name for name in met if name not in shown]:
        for name in left:
            shown.add(name)
            yield f"### {name}\n"
            yield from _fields(parts[name], met)


def _fields(schema: Schema, met: dict[str, None]) -> Iterator[str]:
    if schema.get("description"):
        yield str(schema["description"]).partition("\n")[0].removeprefix("POST ") + "\n"
    properties = cast("dict[str, Schema]", schema.get("properties", {}))
    required = cast("list[str]", schema.get("required", []))
    rows = [
        (
            f"`{name}`" + (" (needed)" if name in required else ""),
            _words(each, met),
            str(each.get("description", "")),
        )
        for name, each in properties.items()
    ]
    yield from table(("field", "type", "meaning"), rows)
    yield ""


def _words(schema: Schema, met: dict[str, None]) -> str:
    """A type and its bounds, in a few words; notes the structs that it names."""
    if "$ref" in schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        met.setdefault(name)
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        several = cast("list[Schema]", schema["anyOf"])
        return " or ".join(_words(each, met) for each in several if each.get("type") != "null")
    if "enum" in schema:
        values = cast("list[object]", schema["enum"])
        return ", ".join(f"`{value}`" for value in values if value is not None)
    kind = str(schema.get("type", "any JSON"))
    if kind == "array":
        items = cast("Schema", schema.get("items", {}))
        kind = f"list of ({_words(items, met)})"
    return kind + _bounds(schema)


def _bounds(schema: Schema) -> str:
    names = {
        "minimum": "≥",
        "exclusiveMinimum": ">",
        "maximum": "≤",
        "exclusiveMaximum": "<",
        "minLength": "length ≥",
        "maxLength": "length ≤",
        "minItems": "length ≥",
        "maxItems": "length ≤",
        "maxProperties": "length ≤",
    }
    limits = ((words, cast("float | None", schema.get(name))) for name, words in names.items())
    # What only keeps a number within its type says nothing.
    said = [
        f"{words} {limit:g}" for words, limit in limits if limit is not None and abs(limit) < _WIDE
    ]
    return f" ({', '.join(said)})" if said else ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
