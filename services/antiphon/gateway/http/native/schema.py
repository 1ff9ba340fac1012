"""Request body of /generate. A null is equivalent to an omitted field."""

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
"""Default of `max_new_tokens`."""
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
    """Watermark options of SGLang."""

    enabled: bool | None = None
    key: int | str | None = None
    context_window: int | None = None


class SamplingBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters. Unknown fields are rejected, as in SGLang."""

    max_new_tokens: Annotated[
        TokensMax | None,
        _is("Maximum number of tokens to generate. Defaults to 128; 0 only processes the prompt."),
    ] = None
    min_new_tokens: Annotated[TokensMax | None, _is("Minimum number of tokens to generate.")] = None
    temperature: Annotated[
        Temperature | None, _is("Sampling temperature. 0 is greedy sampling.")
    ] = None
    top_p: Annotated[
        TopP | None, _is("Nucleus sampling: total probability of the tokens to sample from.")
    ] = None
    top_k: Annotated[
        Annotated[int, Meta(ge=-1)] | None,
        _is("Number of most likely tokens to consider. -1: all."),
    ] = None
    min_p: Annotated[
        MinP | None, _is("Minimum probability, relative to the most likely token.")
    ] = None
    frequency_penalty: Annotated[
        AdditivePenalty | None, _is("Penalty for each time a token was generated.")
    ] = None
    presence_penalty: Annotated[
        AdditivePenalty | None, _is("Penalty for tokens that were generated.")
    ] = None
    repetition_penalty: Annotated[
        RepetitionPenalty | None, _is("Divides the logits of generated tokens. 1 disables it.")
    ] = None
    stop: Annotated[Stops | None, _is("Sequences that stop generation; not returned.")] = None
    stop_token_ids: Annotated[
        Annotated[list[TokenId], Meta(max_length=1024)] | None,
        _is("Further token ids that stop generation."),
    ] = None
    stop_regex: Annotated[
        StopPatterns | None,
        _is("Regular expressions that stop generation, without lookaround and anchors."),
    ] = None
    logit_bias: Annotated[LogitBiases | None, _is("Biases added to logits, by token id.")] = None
    sampling_seed: Annotated[Seed | None, _is("Seed for reproducible sampling.")] = None
    json_schema: Annotated[Schema | None, _is("JSON schema of the output.")] = None
    regex: Annotated[str | None, _is("Regular expression that the output must match.")] = None
    ebnf: Annotated[str | None, _is("EBNF grammar of the output, with start rule `root`.")] = None
    structural_tag: Annotated[
        Schema | None, _is("Structural tag: constrains the tagged parts of the output.")
    ] = None
    ignore_eos: Annotated[bool | None, _is("Whether to continue past end tokens.")] = None
    skip_special_tokens: Annotated[
        bool | None, _is("Whether to omit special tokens. Defaults to true.")
    ] = None
    spaces_between_special_tokens: Annotated[bool | None, _is("Only true is supported.")] = None
    no_stop_trim: Annotated[bool | None, _is("Whether to return the stop sequence.")] = None
    n: Annotated[
        Annotated[int, Meta(ge=1, le=CHOICES_MAX)] | None,
        _is("Number of completions to generate for each prompt."),
    ] = None
    beam_width: Annotated[Literal[1] | None, _is("Not supported: must be 1.")] = None
    custom_params: Annotated[
        dict[str, msgspec.Raw] | None,
        _is("Parameters passed to the processor named by `custom_logit_processor`."),
    ] = None
    watermark: Annotated[Watermark | None, _is("Not supported: accepted only if not enabled.")] = (
        None
    )
    stream_interval: Annotated[
        Annotated[int, Meta(ge=1)] | None, _is("Number of tokens between two events of a stream.")
    ] = None


class SessionParams(msgspec.Struct, frozen=True, kw_only=True):
    """Position of a request in a session."""

    id: Annotated[str, Meta(description="Session id.")]
    rid: Annotated[
        str | None,
        Meta(
            description="Request to continue from. If unset, the request starts from an "
            "empty context."
        ),
    ] = None
    offset: Annotated[
        Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None,
        Meta(
            description="Number of tokens of the earlier context to keep. 0 or unset "
            "keeps all of it; a negative value drops that many from the end."
        ),
    ] = None
    replace: Annotated[
        bool | None,
        Meta(
            description="Whether to abort and discard other requests that continue from "
            "the same one."
        ),
    ] = None
    drop_previous_output: Annotated[
        bool | None, Meta(description="Whether to drop the output of the request continued from.")
    ] = None


class GenerateBody(msgspec.Struct, frozen=True, kw_only=True):
    """Generate text from a prompt or a batch of prompts.

    For a batch, fields that may differ between prompts take a list with one value per prompt.
    """

    text: Annotated[
        str | Annotated[list[str], Batch] | None, _is("Prompt text, or a list of prompt texts.")
    ] = None
    input_ids: Annotated[
        Annotated[Ids[TokenId | TokenIds], Meta(min_length=1)] | None,
        _is("Prompt as token ids, or a list of such prompts. Use instead of `text`."),
    ] = None
    sampling_params: Annotated[
        SamplingBody | PerPrompt[SamplingBody] | None,
        _is("Sampling parameters, or a list of them with one entry per prompt."),
    ] = None
    rid: Annotated[
        Rid | PerPrompt[Rid] | None,
        _is("Request id chosen by the client, or for a batch a prefix or one id per prompt."),
    ] = None
    stream: Annotated[bool | None, _is("Whether to stream the response as it is generated.")] = None
    custom_logit_processor: Annotated[
        str | PerPrompt[str | None] | None,
        _is("Name of a registered logits processor. Serialized code is rejected."),
    ] = None
    return_logprob: Annotated[
        bool | PerPrompt[bool] | None, _is("Whether to return the log probability of each token.")
    ] = None
    logprob_start_len: Annotated[
        LogprobStart | PerPrompt[LogprobStart] | None,
        _is(
            "First prompt token to return logprobs for. -1 returns logprobs of output tokens only."
        ),
    ] = None
    top_logprobs_num: Annotated[
        TopLogprobs | PerPrompt[TopLogprobs] | None,
        _is("Number of most likely tokens to return at each position."),
    ] = None
    token_ids_logprob: Annotated[
        Annotated[list[TokenId | NamedIds], Meta(max_length=BATCH_MAX)] | None,
        _is(
            "Token ids to return logprobs for at each position. For a batch, one list per "
            "prompt is allowed."
        ),
    ] = None
    return_text_in_logprobs: Annotated[
        bool | None, _is("Whether to include the text of each token in logprobs.")
    ] = None
    return_hidden_states: Annotated[
        Hidden | PerPrompt[Hidden] | None,
        _is("Whether to return hidden states: those of the prompt, then those of output tokens."),
    ] = None
    return_prompt_token_ids: Annotated[
        bool | None, _is("Whether to return the prompt token ids.")
    ] = None
    session_id: Annotated[
        str | None, _is("Label of the request. Ignored if `session_params` is set.")
    ] = None
    session_params: Annotated[
        SessionParams | None, _is("Position of the request in a session.")
    ] = None
    max_thinking_tokens: Annotated[TokensMax | None, _is("Maximum number of reasoning tokens.")] = (
        None
    )
    priority: Annotated[
        Priority | None,
        _is("Scheduling priority; higher runs first. Requires --enable-priority-scheduling."),
    ] = None
    cache_salt: Annotated[
        CacheSaltText | PerPrompt[CacheSaltText] | None,
        _is("Restricts prefix cache sharing to requests with the same salt."),
    ] = None
    extra_key: Annotated[
        CacheSaltText | PerPrompt[CacheSaltText] | None, _is("Like `cache_salt`; both must match.")
    ] = None
    no_logs: Annotated[
        bool | None, _is("Exclude the request from request logs and crash dumps.")
    ] = None
