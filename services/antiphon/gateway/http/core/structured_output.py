"""Forms of an answer as bodies name them: at most one, written as a `Grammar`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.wire.errors import InvalidRequest
from antiphon.wire.grammar import Grammar, GrammarKind

if TYPE_CHECKING:
    from collections.abc import Mapping


Schema = str | dict[str, msgspec.Raw]
"""A JSON schema, as text or as it is."""


class RequestedGrammar(msgspec.Struct, frozen=True):
    """A grammar, and the field that it came from."""

    field: str
    grammar: Grammar


def single_grammar(given: Mapping[str, Grammar | None]) -> RequestedGrammar | None:
    """Return the one form that is given, by field.

    Raises:
        InvalidRequest: There are several; names the second.
    """
    forms = [
        RequestedGrammar(field, grammar) for field, grammar in given.items() if grammar is not None
    ]
    if len(forms) > 1:
        both = f"{forms[0].field} and {forms[1].field}"
        raise InvalidRequest(f"an answer has one form; {both} say two", param=forms[1].field)
    return forms[0] if forms else None


def sglang_grammars(
    *, regex: str | None, ebnf: str | None, json_schema: Schema | None
) -> dict[str, Grammar | None]:
    """The forms that SGLang has beside OpenAI's; an empty text is as good as none."""
    return {
        "regex": _form(GrammarKind.REGEX, regex),
        "ebnf": _form(GrammarKind.EBNF, ebnf),
        "json_schema": _form(GrammarKind.JSON_SCHEMA, schema_text(json_schema)),
    }


def schema_text(schema: Schema | None) -> str | None:
    """A schema as text, whether it came as text or as JSON."""
    if schema is None or isinstance(schema, str):
        return schema
    return msgspec.json.encode(schema).decode()


def _form(kind: GrammarKind, text: str | None) -> Grammar | None:
    return Grammar(kind=kind, text=text) if text else None
