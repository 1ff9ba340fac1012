"""Bodies and rejected fields of /generate and /encode. A null is equivalent to an omitted field."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta

from antiphon.gateway.http.core.fields import COMMON, EMBEDDING, NOTHING, UnsupportedField
from antiphon.gateway.http.core.image_options import ImageEmbeds, ImageOptions
from antiphon.gateway.http.core.limits import Choices, Ids, PromptIds, Rid, TokensMax
from antiphon.gateway.http.core.pooling import INPUTS_MAX
from antiphon.gateway.http.core.sampling_fields import Schema, SglangSamplingFields
from antiphon.gateway.sessions import SessionParams
from antiphon.wire.media import MEDIA_MAX, Detail
from antiphon.wire.namespaces import CacheSaltText
from antiphon.wire.sampling import NAMED_MAX, Dimensions, Priority, Seed, TokenId, TopLogprobs

ANSWER_TOKENS = 128
"""Default of `max_new_tokens`."""
BATCH_MAX = 256

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

    max_new_tokens: TokensMax | None = None
    """Maximum number of tokens to generate. Defaults to 128; 0 only processes the prompt."""
    min_tokens: TokensMax | None = msgspec.field(default=None, name="min_new_tokens")
    """Minimum number of tokens to generate."""
    seed: Seed | None = msgspec.field(default=None, name="sampling_seed")
    """Seed for reproducible sampling."""
    structural_tag: Schema | None = None
    """Structural tag: constrains the tagged parts of the output."""
    spaces_between_special_tokens: bool | None = None
    """Only true is supported."""
    n: Choices | None = None
    """Number of completions to generate for each prompt."""
    beam_width: Literal[1] | None = None
    """Not supported: must be 1."""
    watermark: Watermark | None = None
    """Not supported: accepted only if not enabled."""
    stream_interval: Annotated[int, Meta(ge=1)] | None = None
    """Number of tokens between two events of a stream."""


_MEDIA = UnsupportedField("this model accepts text only", NOTHING)
_SEEN = UnsupportedField("use mm_processor_kwargs", NOTHING)
_HASHED = UnsupportedField("images are hashed by the server", NOTHING)


class ImageData(ImageEmbeds, frozen=True, kw_only=True):
    """An image, as SGLang's clients write it beside plain strings, or its embedding."""

    url: str = ""
    """An http, https, `data:` or file URL, a path below the allowed folder, or base64."""
    detail: Detail | None = None
    """`low` limits its tokens in models that scale or cut images by their size; `high` is the
    model's maximum, whatever the server's default."""
    format: str | None = None
    """`precomputed_embedding`: `feature` is the embedding of the image, in place of `url`. Pixels
    (`processor_output`) are rejected."""


class VideoData(msgspec.Struct, frozen=True, kw_only=True):
    """A video, as SGLang's clients write it beside plain strings."""

    url: str
    """An http, https, `data:` or file URL, a path below the allowed folder, or base64."""


class AudioData(msgspec.Struct, frozen=True, kw_only=True):
    """Audio, as SGLang's clients write it beside plain strings."""

    url: str
    """An http, https, `data:` or file URL, a path below the allowed folder, or base64."""


Audios = Annotated[list[str | AudioData | None], Meta(max_length=MEDIA_MAX)]
AudiosOfPrompts = Annotated[
    list[str | AudioData | Audios | None], Meta(max_length=max(MEDIA_MAX, BATCH_MAX))
]
Videos = Annotated[list[str | VideoData | None], Meta(max_length=MEDIA_MAX)]
VideosOfPrompts = Annotated[
    list[str | VideoData | Videos | None], Meta(max_length=max(MEDIA_MAX, BATCH_MAX))
]
Images = Annotated[list[str | ImageData | None], Meta(max_length=MEDIA_MAX)]
ImagesOfPrompts = Annotated[
    list[str | ImageData | Images | None], Meta(max_length=max(MEDIA_MAX, BATCH_MAX))
]
"""For a batch an entry for each prompt, else an entry for each image."""


_PLACED = "requests are placed by the scheduler; clients cannot select a worker"


_EMBEDS = "embeddings are not accepted as {}; use text or input_ids"


class GenerateBody(msgspec.Struct, frozen=True, kw_only=True):
    """Generate text from a prompt or a batch of prompts.

    For a batch, fields that may differ between prompts take a list with one value per prompt.
    """

    text: str | Annotated[list[str], Batch] | None = None
    """Prompt text, or a list of prompt texts."""
    input_ids: Annotated[Ids[TokenId | PromptIds], Meta(min_length=1)] | None = None
    """Prompt as token ids, or a list of such prompts. Use instead of `text`."""
    image_data: str | ImageData | ImagesOfPrompts | None = None
    """Images of the prompt, in the order of their placeholders in `text`: an http, https, `data:`
    or file URL, a path below the allowed folder, base64, or a list of them. For a batch one image
    for all prompts, or one or a list for each."""
    video_data: str | VideoData | VideosOfPrompts | None = None
    """Videos of the prompt, likewise. Media stand in the order of their placeholders, all images
    before all videos, and these before audio."""
    audio_data: str | AudioData | AudiosOfPrompts | None = None
    """Audio files of the prompt, likewise."""
    mm_processor_kwargs: ImageOptions | None = None
    """Numbers of pixels between which media are scaled, and of frames of videos."""
    sampling_params: SamplingBody | PerPrompt[SamplingBody] | None = None
    """Sampling parameters, or a list of them with one entry per prompt."""
    rid: Rid | PerPrompt[Rid] | None = None
    """Request id chosen by the client, or for a batch a prefix or one id per prompt."""
    stream: bool | None = None
    """Whether to stream the response as it is generated."""
    custom_logit_processor: str | PerPrompt[str | None] | None = None
    """Name of a registered logits processor. Serialized code is rejected."""
    return_logprob: bool | PerPrompt[bool] | None = None
    """Whether to return the log probability of each token."""
    logprob_start_len: LogprobStart | PerPrompt[LogprobStart] | None = None
    """First prompt token to return logprobs for. -1 returns logprobs of output tokens only."""
    top_logprobs_num: TopLogprobs | PerPrompt[TopLogprobs] | None = None
    """Number of most likely tokens to return at each position."""
    token_ids_logprob: Annotated[list[TokenId | NamedIds], Meta(max_length=BATCH_MAX)] | None = None
    """Token ids to return logprobs for at each position. For a batch, one list per prompt is
    allowed."""
    return_text_in_logprobs: bool | None = None
    """Whether to include the text of each token in logprobs."""
    return_hidden_states: Hidden | PerPrompt[Hidden] | None = None
    """Whether to return hidden states: those of the prompt, then those of output tokens."""
    return_prompt_token_ids: bool | None = None
    """Whether to return the prompt token ids."""
    session_id: str | None = None
    """Label of the request. Ignored if `session_params` is set."""
    session_params: SessionParams | None = None
    """Position of the request in a session."""
    max_thinking_tokens: TokensMax | None = None
    """Maximum number of reasoning tokens."""
    priority: Priority | None = None
    """Scheduling priority; higher runs first. Requires --enable-priority-scheduling."""
    cache_salt: CacheSaltText | PerPrompt[CacheSaltText] | None = None
    """Restricts prefix cache sharing to requests with the same salt."""
    extra_key: CacheSaltText | PerPrompt[CacheSaltText] | None = None
    """Like `cache_salt`; both must match."""
    no_logs: bool | None = None
    """Exclude the request from request logs and crash dumps."""

    UNSUPPORTED: ClassVar = {
        **COMMON,
        "input_embeds": UnsupportedField(_EMBEDS.format("prompts")),
        "video_config": _SEEN,
        **dict.fromkeys(("mm_hashes", "mm_content_hashes"), _HASHED),
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


class EncodeBody(msgspec.Struct, frozen=True, kw_only=True):
    """Encode texts to vectors, or to raw scores.

    Exactly one of `text` and `input_ids` is required.
    """

    text: str | Annotated[list[str], Meta(min_length=1, max_length=INPUTS_MAX)] | None = None
    """Text to encode, or a list of texts."""
    input_ids: Annotated[Ids[TokenId | PromptIds], Meta(min_length=1)] | None = None
    """Token ids to encode, or a list of token id lists. Use instead of `text`."""
    dimensions: Dimensions | None = None
    """Number of leading dimensions to return, for Matryoshka models."""
    rid: Rid | None = None
    """Request id chosen by the client; for several texts a prefix."""
    priority: Priority | None = None
    """Scheduling priority; higher runs first. Requires --enable-priority-scheduling."""
    cache_salt: CacheSaltText | None = None
    """Restricts prefix cache sharing to requests with the same salt."""
    extra_key: CacheSaltText | None = None
    """Like `cache_salt`; both must match."""

    UNSUPPORTED: ClassVar = {
        **EMBEDDING,
        "input_embeds": UnsupportedField(_EMBEDS.format("inputs")),
        **dict.fromkeys(("image_data", "video_data", "audio_data", "modalities"), _MEDIA),
        "sampling_params": UnsupportedField("this API does not sample tokens", NOTHING),
        "is_cross_encoder_request": UnsupportedField("use /v1/rerank for pairs of texts", (False,)),
        "return_pooled_hidden_states": UnsupportedField(
            "the pooled output is always returned", (False,)
        ),
    }
