"""Structured output options of request bodies: at most one, converted to a `Grammar`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.wire.errors import InvalidRequest
from antiphon.wire.grammar import Grammar, GrammarKind

if TYPE_CHECKING:
    from collections.abc import Mapping


Schema = str | dict[str, msgspec.Raw]
"""A JSON schema, as JSON text or as an object."""


class RequestedGrammar(msgspec.Struct, frozen=True):
    """A grammar, and the field that requested it."""

    field: str
    grammar: Grammar


def single_grammar(given: Mapping[str, Grammar | None]) -> RequestedGrammar | None:
    """Return the one output constraint that is set.

    Raises:
        InvalidRequest: More than one is set; `param` names the second.
    """
    forms = [
        RequestedGrammar(field, grammar) for field, grammar in given.items() if grammar is not None
    ]
    if len(forms) > 1:
        both = f"{forms[0].field} and {forms[1].field}"
        raise InvalidRequest(
            f"only one output constraint is allowed; {both} are both set", param=forms[1].field
        )
    return forms[0] if forms else None


def sglang_grammars(
    *, regex: str | None, ebnf: str | None, json_schema: Schema | None
) -> dict[str, Grammar | None]:
    """SGLang's constraint fields in addition to OpenAI's. An empty string counts as unset."""
    return {
        "regex": _grammar(GrammarKind.REGEX, regex),
        "ebnf": _grammar(GrammarKind.EBNF, ebnf),
        "json_schema": _grammar(GrammarKind.JSON_SCHEMA, schema_text(json_schema)),
    }


def schema_text(schema: Schema | None) -> str | None:
    """Return a schema as JSON text."""
    if schema is None or isinstance(schema, str):
        return schema
    return msgspec.json.encode(schema).decode()


def _grammar(kind: GrammarKind, text: str | None) -> Grammar | None:
    return Grammar(kind=kind, text=text) if text else None
