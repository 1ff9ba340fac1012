"""Sampling fields of request bodies beyond `requests/sampling.py`, as SGLang's APIs have them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from antiphon.gateway.requests.sampling import SamplingFields, SamplingOptions
from antiphon.wire.errors import InvalidRequest
from antiphon.wire.generate import CHOICES_MAX, LogitBiases
from antiphon.wire.grammar import Grammar, GrammarKind
from antiphon.wire.sampling import (
    STOPS_MAX,
    StopPattern,
    StopString,
    StopStrings,
    TokenIds,
    TokenOutputParams,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from antiphon.wire.processors import LogitProcessor

Choices = Annotated[int, Meta(ge=1, le=CHOICES_MAX)]
Json = dict[str, msgspec.Raw]
Rid = Annotated[str, Meta(min_length=1, max_length=256)]
Schema = str | Json
"""A JSON schema, as JSON text or as an object."""
StopPatterns = StopPattern | Annotated[list[StopPattern], Meta(max_length=STOPS_MAX)]
Stops = StopString | Annotated[list[StopString], Meta(max_length=STOPS_MAX)]
TokensMax = Annotated[int, Meta(ge=0, le=2**31 - 1)]


def doc(text: str) -> Meta:
    """Describe a field in the OpenAPI document and the reference page."""
    return Meta(description=text)


class SglangSamplingFields(SamplingFields):
    """Stop conditions, output constraints and biases."""

    logit_bias: Annotated[LogitBiases | None, doc("Biases added to logits, by token id.")] = None
    stop: Annotated[Stops | None, doc("Sequences that stop generation; not returned.")] = None
    stop_regex: Annotated[
        StopPatterns | None,
        doc("Regular expressions that stop generation, without lookaround and anchors."),
    ] = None
    stop_token_ids: Annotated[TokenIds | None, doc("Further token ids that stop generation.")] = (
        None
    )
    ignore_eos: Annotated[bool | None, doc("Whether to continue past end tokens.")] = None
    no_stop_trim: Annotated[bool | None, doc("Whether to return the stop sequence.")] = None
    skip_special_tokens: Annotated[
        bool | None, doc("Whether to omit special tokens. Defaults to true.")
    ] = None
    regex: Annotated[str | None, doc("Regular expression that the output must match.")] = None
    ebnf: Annotated[str | None, doc("EBNF grammar of the output, with start rule `root`.")] = None
    json_schema: Annotated[Schema | None, doc("JSON schema of the output.")] = None
    custom_params: Annotated[Json | None, doc("Parameters passed to `custom_logit_processor`.")] = (
        None
    )

    def options(
        self,
        *,
        processors: tuple[LogitProcessor, ...],
        grammar: Grammar | None,
        outputs: TokenOutputParams | None,
        prefix: str = "",
    ) -> SamplingOptions:
        """Return the options of a request; `prefix` is the path of these fields in the body.

        Raises:
            InvalidRequest: `top_k` is 0, which disables it in some APIs only.
        """
        if self.top_k == 0:
            text = "top_k: must be -1 (no limit) or at least 1"
            raise InvalidRequest(text, param=f"{prefix}top_k")
        given = SamplingOptions(processors=processors, grammar=grammar, details=outputs)
        return given.with_fields_of(self)

    def stop_strings(self, *, token_texts: bool) -> StopStrings:
        """Return the stop strings and detokenization options."""
        return StopStrings(
            strings=as_tuple(self.stop),
            patterns=as_tuple(self.stop_regex),
            include=bool(self.no_stop_trim),
            skip_special_tokens=self.skip_special_tokens is not False,
            token_texts=token_texts,
        )

    def grammars(self) -> dict[str, Grammar | None]:
        """Return the output constraints by field. An empty string counts as unset."""
        return {
            "regex": _grammar(GrammarKind.REGEX, self.regex),
            "ebnf": _grammar(GrammarKind.EBNF, self.ebnf),
            "json_schema": schema_grammar(GrammarKind.JSON_SCHEMA, self.json_schema),
        }


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


def schema_grammar(kind: GrammarKind, schema: Schema | None) -> Grammar | None:
    """Return the grammar of a schema, given as an object or as its JSON text."""
    if schema is not None and not isinstance(schema, str):
        schema = msgspec.json.encode(schema).decode()
    return _grammar(kind, schema)


def _grammar(kind: GrammarKind, text: str | None) -> Grammar | None:
    return Grammar(kind=kind, text=text) if text else None


def as_tuple(stops: str | list[str] | None) -> tuple[str, ...]:
    """Return one sequence or several as a tuple."""
    return (stops,) if isinstance(stops, str) else tuple(stops or ())
