"""Settings of grammar-guided generation: how grammars are compiled, and their limits."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from antiphon.config.schema import Bytes, Config, Seconds, Threads

WHITESPACE_MAX = 256
Characters = Annotated[int, Meta(ge=1, le=WHITESPACE_MAX, extra={"unit": "characters"})]
Entries = Annotated[int, Meta(ge=1, extra={"unit": "entries"})]

Properties = Annotated[int, Meta(ge=1, extra={"unit": "properties"})]


class GrammarConfig(Config):
    """Structured output: JSON schemas, regular expressions and grammars."""

    backend: Literal["xgrammar", "none"] = "xgrammar"
    """Backend that compiles grammars; none rejects requests with a grammar."""
    whitespace_max: Characters = 20
    """Maximum whitespace between two JSON tokens, in characters; without a limit, a model may
    generate whitespace forever."""
    compact_json: bool = False
    """Whether JSON is generated on one line, with one space after commas and colons and no other
    whitespace."""
    compile_timeout_s: Seconds = 10.0
    """Timeout of compiling a grammar, in seconds; a grammar that exceeds it is rejected for a
    while."""
    properties_max: Properties = 1000
    """Maximum number of properties in a JSON schema, over all its objects; checked before
    compilation."""
    follow_timeout_s: Seconds = 10.0
    """Timeout of advancing the grammar by one token, in seconds; a request that exceeds it ends as
    overloaded."""
    workers: Threads = 1
    """Number of grammars compiled concurrently, at low priority; one more is compiled for a tenant
    that has none in progress. Tenants take turns."""
    cache_entries: Entries = 256
    """Maximum number of cached compilation results, including errors."""
    cache_bytes: Bytes = 256 * 1024**2
    """Maximum memory of compiled grammars, in bytes (approximate)."""
