"""Bodies and rejected fields of /generate and /encode. A null is equivalent to an omitted field."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from antiphon.gateway.http.core.fields import COMMON, EMBEDDING, NOTHING, UnsupportedField
from antiphon.gateway.http.core.limits import Ids
from antiphon.gateway.http.core.sampling import (
    Choices,
    Rid,
    Schema,
    SglangSamplingFields,
    TokensMax,
    doc,
)
from antiphon.gateway.sessions.session import SessionParams
from antiphon.wire.digests import CacheSaltText
from antiphon.wire.processors import TokenId
from antiphon.wire.sampling import NAMED_MAX, Priority, Seed, TopLogprobs

if TYPE_CHECKING:
    from collections.abc import Mapping

ANSWER_TOKENS = 128
"""Default of `max_new_tokens`."""
BATCH_MAX = 256

TokenIds = Annotated[Ids[TokenId], Meta(min_length=1)]
LogprobStart = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
NamedIds = Annotated[list[TokenId], Meta(max_length=NAMED_MAX)]
Hidden = bool | Literal["last"]
Batch = Meta(min_length=1, max_length=BATCH_MAX)
T = TypeVar("T")
PerPrompt = Annotated[list[T], Meta(max_length=BATCH_MAX)]


class Watermark(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Watermark options of SGLang."""

    enabled: bool | None = None
    key: int | str | None = None
    context_window: int | None = None


class SamplingBody(SglangSamplingFields, forbid_unknown_fields=True):
    """Sampling parameters. Unknown fields are rejected, as in SGLang."""

    max_new_tokens: Annotated[
        TokensMax | None,
        doc("Maximum number of tokens to generate. Defaults to 128; 0 only processes the prompt."),
    ] = None
    min_tokens: Annotated[TokensMax | None, doc("Minimum number of tokens to generate.")] = (
        msgspec.field(default=None, name="min_new_tokens")
    )
    seed: Annotated[Seed | None, doc("Seed for reproducible sampling.")] = msgspec.field(
        default=None, name="sampling_seed"
    )
    structural_tag: Annotated[
        Schema | None, doc("Structural tag: constrains the tagged parts of the output.")
    ] = None
    spaces_between_special_tokens: Annotated[bool | None, doc("Only true is supported.")] = None
    n: Annotated[Choices | None, doc("Number of completions to generate for each prompt.")] = None
    beam_width: Annotated[Literal[1] | None, doc("Not supported: must be 1.")] = None
    watermark: Annotated[Watermark | None, doc("Not supported: accepted only if not enabled.")] = (
        None
    )
    stream_interval: Annotated[
        Annotated[int, Meta(ge=1)] | None, doc("Number of tokens between two events of a stream.")
    ] = None


class GenerateBody(msgspec.Struct, frozen=True, kw_only=True):
    """Generate text from a prompt or a batch of prompts.

    For a batch, fields that may differ between prompts take a list with one value per prompt.
    """

    text: Annotated[
        str | Annotated[list[str], Batch] | None, doc("Prompt text, or a list of prompt texts.")
    ] = None
    input_ids: Annotated[
        Annotated[Ids[TokenId | TokenIds], Meta(min_length=1)] | None,
        doc("Prompt as token ids, or a list of such prompts. Use instead of `text`."),
    ] = None
    sampling_params: Annotated[
        SamplingBody | PerPrompt[SamplingBody] | None,
        doc("Sampling parameters, or a list of them with one entry per prompt."),
    ] = None
    rid: Annotated[
        Rid | PerPrompt[Rid] | None,
        doc("Request id chosen by the client, or for a batch a prefix or one id per prompt."),
    ] = None
    stream: Annotated[bool | None, doc("Whether to stream the response as it is generated.")] = None
    custom_logit_processor: Annotated[
        str | PerPrompt[str | None] | None,
        doc("Name of a registered logits processor. Serialized code is rejected."),
    ] = None
    return_logprob: Annotated[
        bool | PerPrompt[bool] | None, doc("Whether to return the log probability of each token.")
    ] = None
    logprob_start_len: Annotated[
        LogprobStart | PerPrompt[LogprobStart] | None,
        doc(
            "First prompt token to return logprobs for. -1 returns logprobs of output tokens only."
        ),
    ] = None
    top_logprobs_num: Annotated[
        TopLogprobs | PerPrompt[TopLogprobs] | None,
        doc("Number of most likely tokens to return at each position."),
    ] = None
    token_ids_logprob: Annotated[
        Annotated[list[TokenId | NamedIds], Meta(max_length=BATCH_MAX)] | None,
        doc(
            "Token ids to return logprobs for at each position. For a batch, one list per "
            "prompt is allowed."
        ),
    ] = None
    return_text_in_logprobs: Annotated[
        bool | None, doc("Whether to include the text of each token in logprobs.")
    ] = None
    return_hidden_states: Annotated[
        Hidden | PerPrompt[Hidden] | None,
        doc("Whether to return hidden states: those of the prompt, then those of output tokens."),
    ] = None
    return_prompt_token_ids: Annotated[
        bool | None, doc("Whether to return the prompt token ids.")
    ] = None
    session_id: Annotated[
        str | None, doc("Label of the request. Ignored if `session_params` is set.")
    ] = None
    session_params: Annotated[
        SessionParams | None, doc("Position of the request in a session.")
    ] = None
    max_thinking_tokens: Annotated[TokensMax | None, doc("Maximum number of reasoning tokens.")] = (
        None
    )
    priority: Annotated[
        Priority | None,
        doc("Scheduling priority; higher runs first. Requires --enable-priority-scheduling."),
    ] = None
    cache_salt: Annotated[
        CacheSaltText | PerPrompt[CacheSaltText] | None,
        doc("Restricts prefix cache sharing to requests with the same salt."),
    ] = None
    extra_key: Annotated[
        CacheSaltText | PerPrompt[CacheSaltText] | None, doc("Like `cache_salt`; both must match.")
    ] = None
    no_logs: Annotated[
        bool | None, doc("Exclude the request from request logs and crash dumps.")
    ] = None


_MEDIA = UnsupportedField("this model accepts text only", NOTHING)
_PLACED = "requests are placed by the scheduler; clients cannot select a worker"
_EMBEDS = "embeddings are not accepted as {}; use text or input_ids"

GENERATE_UNSUPPORTED: Mapping[str, UnsupportedField] = {
    **COMMON,
    "input_embeds": UnsupportedField(_EMBEDS.format("prompts")),
    **dict.fromkeys(("image_data", "video_data", "audio_data", "modalities"), _MEDIA),
    **dict.fromkeys(("mm_hashes", "mm_content_hashes", "video_config"), _MEDIA),
    "mm_processor_kwargs": _MEDIA,
    "routing_key": UnsupportedField(_PLACED),
    "background": UnsupportedField(
        "background generation is not supported by /generate; use /v1/responses", (False,)
    ),
    "external_trace_header": UnsupportedField("set the traceparent header instead", NOTHING),
    **dict.fromkeys(
        (
            "return_flat_raw_top_logprobs",
            "return_flat_raw_output_top_logprobs",
            "return_flat_raw_top_logprobs_b64",
        ),
        UnsupportedField("logprobs are returned as lists", (False,)),
    ),
    "routed_experts_start_len": UnsupportedField("expert routing is not recorded", (0, -1)),
    "return_input_ids_in_sglext": UnsupportedField("use return_prompt_token_ids", (False,)),
    "return_output_ids_in_sglext": UnsupportedField("output_ids are always returned", (False,)),
    **dict.fromkeys(
        ("return_indexer_topk", "return_entropy", "return_sampling_mask"),
        UnsupportedField("sampling masks are not returned", (False,)),
    ),
    "sampling_logprobs_mode": UnsupportedField(
        "logprobs are always computed over the whole vocabulary", ("",)
    ),
    "require_reasoning": UnsupportedField(
        "reasoning is not required by this API; use /v1/chat/completions", (False,)
    ),
    "decode_tp_size": UnsupportedField("prefill and decode run in the same worker"),
    "kv_hints": UnsupportedField(_PLACED, NOTHING),
}

ENCODE_UNSUPPORTED: Mapping[str, UnsupportedField] = {
    **EMBEDDING,
    "input_embeds": UnsupportedField(_EMBEDS.format("inputs")),
    **dict.fromkeys(("image_data", "video_data", "audio_data", "modalities"), _MEDIA),
    "sampling_params": UnsupportedField("this API does not sample tokens", NOTHING),
    "is_cross_encoder_request": UnsupportedField("use /v1/rerank for pairs of texts", (False,)),
    "return_pooled_hidden_states": UnsupportedField(
        "the pooled output is always returned", (False,)
    ),
}
