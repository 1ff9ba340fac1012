"""Answers of a given form: how grammars are compiled, and what they may cost."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from antiphon.config.schema import Bytes, Config, Help, Seconds, Threads

WHITESPACE_MAX = 256
Characters = Annotated[int, Meta(ge=1, le=WHITESPACE_MAX, extra={"unit": "characters"})]
Entries = Annotated[int, Meta(ge=1, extra={"unit": "entries"})]

Properties = Annotated[int, Meta(ge=1, extra={"unit": "properties"})]


class GrammarConfig(Config):
    """Answers of a given form: JSON of a schema, text of a regular expression or a grammar."""

    backend: Annotated[
        Literal["xgrammar", "none"], Help("What compiles grammars; none refuses them.")
    ] = "xgrammar"
    whitespace_max: Annotated[
        Characters,
        Help("Most white space between two parts of JSON; without a bound it may never end."),
    ] = 20
    compact_json: Annotated[
        bool, Help("JSON on one line: one space after commas and colons, none elsewhere.")
    ] = False
    compile_timeout_s: Annotated[
        Seconds, Help("A grammar that takes longer to compile is refused for a while.")
    ] = 10.0
    properties_max: Annotated[
        Properties,
        Help(
            "Maximum number of properties of a JSON schema, those of all its objects together; "
            "checked before it is compiled."
        ),
    ] = 1000
    follow_timeout_s: Annotated[
        Seconds, Help("An answer of which one token takes longer to follow ends as overloaded.")
    ] = 10.0
    workers: Annotated[
        Threads,
        Help(
            "Grammars compiled at once, at low priority, and one more of a tenant that has none "
            "among them; tenants take turns."
        ),
    ] = 1
    cache_entries: Annotated[
        Entries, Help("Most compiled grammars kept, those that do not compile included.")
    ] = 256
    cache_bytes: Annotated[Bytes, Help("Most memory that compiled grammars take, about.")] = (
        256 * 1024**2
    )
