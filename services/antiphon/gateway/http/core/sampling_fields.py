"""Sampling fields of request bodies: those of all HTTP APIs, then OpenAI's and SGLang's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from antiphon.gateway.http.core.fields import decode
from antiphon.gateway.http.core.limits import Json
from antiphon.gateway.requests.generation_request import SamplingOptions
from antiphon.wire.errors import InvalidRequest, Unsupported
from antiphon.wire.generate import LogitBiases
from antiphon.wire.sampling import (
    REGISTERED,
    STOPS_MAX,
    AdditivePenalty,
    Grammar,
    GrammarKind,
    LogitProcessor,
    SamplingDefaults,
    StopPattern,
    StopString,
    StopStrings,
    TokenIds,
    TokenOutputParams,
)

if TYPE_CHECKING:
    from collections.abc import Mapping


Schema = str | Json
"""A JSON schema, as JSON text or as an object."""
StopPatterns = StopPattern | Annotated[list[StopPattern], Meta(max_length=STOPS_MAX)]
Stops = StopString | Annotated[list[StopString], Meta(max_length=STOPS_MAX)]
NAME = "custom_logit_processor"


class SamplingFields(SamplingDefaults):
    """Sampling fields that the bodies of the HTTP APIs share."""

    top_k: Annotated[int, Meta(ge=-1)] | None = None
    """Number of most likely tokens to consider. -1: all."""
    frequency_penalty: AdditivePenalty | None = None
    """Penalty for each time a token was generated."""
    presence_penalty: AdditivePenalty | None = None
    """Penalty for tokens that were generated."""


class SglangSamplingFields(SamplingFields):
    """Stop conditions, output constraints and biases."""

    logit_bias: LogitBiases | None = None
    """Biases added to logits, by token id."""
    stop: Stops | None = None
    """Sequences that stop generation; not returned."""
    stop_regex: StopPatterns | None = None
    """Regular expressions that stop generation, without lookaround and anchors."""
    stop_token_ids: TokenIds | None = None
    """Further token ids that stop generation."""
    ignore_eos: bool | None = None
    """Whether to continue past end tokens."""
    no_stop_trim: bool | None = None
    """Whether to return the stop sequence."""
    skip_special_tokens: bool | None = None
    """Whether to omit special tokens. Defaults to true."""
    regex: str | None = None
    """Regular expression that the output must match."""
    ebnf: str | None = None
    """EBNF grammar of the output, with start rule `root`."""
    json_schema: Schema | None = None
    """JSON schema of the output."""
    custom_params: Json | None = None
    """Parameters passed to `custom_logit_processor`."""

    def options(
        self,
        *,
        processors: tuple[LogitProcessor, ...],
        grammar: Grammar | None,
        outputs: TokenOutputParams | None,
        prefix: str = "",
    ) -> SamplingOptions:
        """Return the options of a request; `prefix` is the path of these fields in the body."""
        if self.top_k == 0:
            text = "top_k: must be -1 (no limit) or at least 1"
            raise InvalidRequest(text, param=f"{prefix}top_k")
        given = SamplingOptions(processors=processors, grammar=grammar, details=outputs)
        return given.with_fields_of(self)

    def stop_strings(self, *, token_texts: bool) -> StopStrings:
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


def single_grammar(given: Mapping[str, Grammar | None]) -> tuple[str, Grammar | None]:
    """Return the one output constraint that is set, and its field; reject a second."""
    fields = [field for field, grammar in given.items() if grammar is not None]
    if len(fields) > 1:
        both = f"{fields[0]} and {fields[1]}"
        raise InvalidRequest(
            f"only one output constraint is allowed; {both} are both set", param=fields[1]
        )
    return (fields[0], given[fields[0]]) if fields else ("grammar", None)


def schema_grammar(kind: GrammarKind, schema: Schema | None) -> Grammar | None:
    if schema is not None and not isinstance(schema, str):
        schema = msgspec.json.encode(schema).decode()
    return _grammar(kind, schema)


def _grammar(kind: GrammarKind, text: str | None) -> Grammar | None:
    return Grammar(kind=kind, text=text) if text else None


def as_tuple(stops: str | list[str] | None) -> tuple[str, ...]:
    return (stops,) if isinstance(stops, str) else tuple(stops or ())


def processor_of(
    name: str | None, given: Mapping[str, msgspec.Raw] | None, *, field: str
) -> tuple[LogitProcessor, ...]:
    """Return the named processor, if there is one; `field` is the API's name of its parameters."""
    if not name:
        if given:
            raise InvalidRequest.at(field, f"requires {NAME}")
        return ()
    if (kind := REGISTERED.get(name)) is None:
        known = ", ".join(REGISTERED)
        raise Unsupported.at(
            NAME, f"code in requests is never run; use the name of a registered processor: {known}"
        )
    given = given or {}
    if strange := given.keys() - set(kind.__struct_fields__):
        known = ", ".join(kind.__struct_fields__)
        text = f"{field}: unknown parameter {min(strange)}; allowed are {known}"
        raise InvalidRequest(text, param=f"{field}.{min(strange)}")
    return (decode(msgspec.json.encode(given), kind, field),)
