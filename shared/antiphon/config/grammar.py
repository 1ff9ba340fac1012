"""Settings of grammar-guided generation: how grammars are compiled, and their limits."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from antiphon.config.schema import Bytes, Config, Help, Seconds, Threads

WHITESPACE_MAX = 256
Characters = Annotated[int, Meta(ge=1, le=WHITESPACE_MAX, extra={"unit": "characters"})]
Entries = Annotated[int, Meta(ge=1, extra={"unit": "entries"})]

Properties = Annotated[int, Meta(ge=1, extra={"unit": "properties"})]


class GrammarConfig(Config):
    """Structured output: JSON schemas, regular expressions and grammars."""

    backend: Annotated[
        Literal["xgrammar", "none"],
        Help("Backend that compiles grammars; none rejects requests with a grammar."),
    ] = "xgrammar"
    whitespace_max: Annotated[
        Characters,
        Help(
            "Maximum whitespace between two JSON tokens, in characters; without a limit, a model "
            "may generate whitespace forever."
        ),
    ] = 20
    compact_json: Annotated[
        bool,
        Help(
            "Whether JSON is generated on one line, with one space after commas and colons and no "
            "other whitespace."
        ),
    ] = False
    compile_timeout_s: Annotated[
        Seconds,
        Help(
            "Timeout of compiling a grammar, in seconds; a grammar that exceeds it is rejected "
            "for a while."
        ),
    ] = 10.0
    properties_max: Annotated[
        Properties,
        Help(
            "Maximum number of properties in a JSON schema, over all its objects; checked before "
            "compilation."
        ),
    ] = 1000
    follow_timeout_s: Annotated[
        Seconds,
        Help(
            "Timeout of advancing the grammar by one token, in seconds; a request that exceeds it "
            "ends as overloaded."
        ),
    ] = 10.0
    workers: Annotated[
        Threads,
        Help(
            "Number of grammars compiled concurrently, at low priority; one more is compiled for "
            "a tenant that has none in progress. Tenants take turns."
        ),
    ] = 1
    cache_entries: Annotated[
        Entries, Help("Maximum number of cached compilation results, including errors.")
    ] = 256
    cache_bytes: Annotated[
        Bytes, Help("Maximum memory of compiled grammars, in bytes (approximate).")
    ] = 256 * 1024**2
