"""The body of /generate: every field, its bounds and its meaning. A null is as good as nothing."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from antiphon.gateway.http.core.limits import Ids
from antiphon.gateway.http.core.structured_output import Schema
from antiphon.wire.digests import CacheSaltText
from antiphon.wire.generate import CHOICES_MAX, LogitBiases
from antiphon.wire.processors import TokenId
from antiphon.wire.sampling import (
    NAMED_MAX,
    STOPS_MAX,
    AdditivePenalty,
    MinP,
    Priority,
    RepetitionPenalty,
    Seed,
    StopPattern,
    StopString,
    Temperature,
    TopLogprobs,
    TopP,
)

ANSWER_TOKENS = 128
"""How long an answer gets that says nothing."""
BATCH_MAX = 256

TokensMax = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Rid = Annotated[str, Meta(min_length=1, max_length=256)]
Stops = StopString | Annotated[list[StopString], Meta(max_length=STOPS_MAX)]
StopPatterns = StopPattern | Annotated[list[StopPattern], Meta(max_length=STOPS_MAX)]
TokenIds = Annotated[Ids[TokenId], Meta(min_length=1)]
LogprobStart = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
NamedIds = Annotated[list[TokenId], Meta(max_length=NAMED_MAX)]
Hidden = bool | Literal["last"]
Batch = Meta(min_length=1, max_length=BATCH_MAX)
T = TypeVar("T")
PerPrompt = Annotated[list[T], Meta(max_length=BATCH_MAX)]


def _is(meaning: str) -> Meta:
    return Meta(description=meaning)


class Watermark(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A mark in the choice of tokens, as SGLang describes it."""

    enabled: bool | None = None
    key: int | str | None = None
    context_window: int | None = None


class SamplingBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are drawn and when an answer ends. Unknown fields are refused, as in SGLang."""

    max_new_tokens: Annotated[
        TokensMax | None, _is("Longest answer; 128 unless said. 0 only reads the prompt.")
    ] = None
    min_new_tokens: Annotated[TokensMax | None, _is("No end token is drawn before.")] = None
    temperature: Annotated[Temperature | None, _is("0 takes the likeliest token.")] = None
    top_p: Annotated[TopP | None, _is("Draws from the likeliest tokens up to this mass.")] = None
    top_k: Annotated[
        Annotated[int, Meta(ge=-1)] | None, _is("Draws from so many; -1 from all.")
    ] = None
    min_p: Annotated[MinP | None, _is("Draws from tokens at least so likely.")] = None
    frequency_penalty: Annotated[
        AdditivePenalty | None, _is("Taken off a logit for each time its token was drawn.")
    ] = None
    presence_penalty: Annotated[
        AdditivePenalty | None, _is("Taken off a logit once its token was drawn.")
    ] = None
    repetition_penalty: Annotated[
        RepetitionPenalty | None, _is("Divides the logits of tokens that were drawn.")
    ] = None
    stop: Annotated[Stops | None, _is("Texts that end the answer, and are left out of it.")] = None
    stop_token_ids: Annotated[
        Annotated[list[TokenId], Meta(max_length=1024)] | None, _is("Tokens that end it.")
    ] = None
    stop_regex: Annotated[StopPatterns | None, _is("Regular expressions that end it.")] = None
    logit_bias: Annotated[LogitBiases | None, _is("Added to the logits of single tokens.")] = None
    sampling_seed: Annotated[Seed | None, _is("The same draws each time.")] = None
    json_schema: Annotated[Schema | None, _is("The answer is JSON of this schema.")] = None
    regex: Annotated[str | None, _is("The answer matches this as a whole.")] = None
    ebnf: Annotated[str | None, _is("The answer is a `root` of these rules.")] = None
    structural_tag: Annotated[Schema | None, _is("The answer is text with tags of this form.")] = (
        None
    )
    ignore_eos: Annotated[bool | None, _is("The model's own end tokens do not end it.")] = None
    skip_special_tokens: Annotated[bool | None, _is("Special tokens write no text.")] = None
    spaces_between_special_tokens: Annotated[bool | None, _is("Only true is served.")] = None
    no_stop_trim: Annotated[bool | None, _is("Leaves the stop in the text.")] = None
    n: Annotated[
        Annotated[int, Meta(ge=1, le=CHOICES_MAX)] | None, _is("How many answers to each prompt.")
    ] = None
    beam_width: Annotated[Literal[1] | None, _is("Beam search is not built.")] = None
    custom_params: Annotated[
        dict[str, msgspec.Raw] | None,
        _is("The parameters of the `custom_logit_processor` that the body names."),
    ] = None
    watermark: Annotated[
        Watermark | None, _is("Watermarks are not built: only what is not enabled is served.")
    ] = None
    stream_interval: Annotated[
        Annotated[int, Meta(ge=1)] | None, _is("How many tokens are worth an event of a stream.")
    ] = None


class SessionParams(msgspec.Struct, frozen=True, kw_only=True):
    """Where in a session a request stands.

    Attributes:
        rid: The request that it goes on from; none: it begins the session anew.
        offset: How many tokens of what was before it are kept; 0 or none: all; below zero: all but
            so many.
        replace: What else went on from there is aborted and forgotten.
        drop_previous_output: The answer before it is left out.
    """

    id: str
    rid: str | None = None
    offset: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    replace: bool | None = None
    drop_previous_output: bool | None = None


class GenerateBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /generate. A batch has a list of prompts; what may differ in it may be a list, too."""

    text: Annotated[
        str | Annotated[list[str], Batch] | None, _is("The prompt, or a batch of prompts.")
    ] = None
    input_ids: Annotated[
        Annotated[Ids[TokenId | TokenIds], Meta(min_length=1)] | None,
        _is("The prompt as token ids, or a batch of them; in place of text."),
    ] = None
    sampling_params: Annotated[
        SamplingBody | PerPrompt[SamplingBody] | None, _is("How tokens are drawn.")
    ] = None
    rid: Annotated[
        Rid | PerPrompt[Rid] | None,
        _is("The client's name for the request; of a batch, how the names begin."),
    ] = None
    stream: Annotated[bool | None, _is("Tells the answer as it is made.")] = None
    custom_logit_processor: Annotated[
        str | PerPrompt[str | None] | None,
        _is("The name of a processor that is registered; code is refused."),
    ] = None
    return_logprob: Annotated[
        bool | PerPrompt[bool] | None, _is("Whether to return the log probability of each token.")
    ] = None
    logprob_start_len: Annotated[
        LogprobStart | PerPrompt[LogprobStart] | None,
        _is("From which token of the prompt on; -1: only of the answer."),
    ] = None
    top_logprobs_num: Annotated[
        TopLogprobs | PerPrompt[TopLogprobs] | None, _is("And of so many of the likeliest.")
    ] = None
    token_ids_logprob: Annotated[
        Annotated[list[TokenId | NamedIds], Meta(max_length=BATCH_MAX)] | None,
        _is("And of these tokens, at each place; for a batch it may be a list for each prompt."),
    ] = None
    return_text_in_logprobs: Annotated[bool | None, _is("Names the text of each token.")] = None
    return_hidden_states: Annotated[
        Hidden | PerPrompt[Hidden] | None,
        _is("Tells the states that tokens followed from, those of the prompt first; or the last."),
    ] = None
    return_prompt_token_ids: Annotated[bool | None, _is("Tells the ids of the prompt.")] = None
    session_id: Annotated[str | None, _is("A label; where session_params stand, it is not.")] = None
    session_params: Annotated[
        SessionParams | None, _is("Where in a session the request stands.")
    ] = None
    max_thinking_tokens: Annotated[
        TokensMax | None, _is("After so many tokens of thinking its mark ends it.")
    ] = None
    priority: Annotated[
        Priority | None, _is("The higher goes first, where the operator goes by priorities.")
    ] = None
    cache_salt: Annotated[
        CacheSaltText | PerPrompt[CacheSaltText] | None,
        _is("Cached prefixes are shared with those who say the same."),
    ] = None
    extra_key: Annotated[
        CacheSaltText | PerPrompt[CacheSaltText] | None, _is("Likewise; both must be the same.")
    ] = None
    no_logs: Annotated[
        bool | None, _is("Leaves the request out of request logs and crash dumps.")
    ] = None
