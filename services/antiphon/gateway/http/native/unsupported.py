"""Documented fields of SGLang's native API that this server rejects, each with a reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.gateway.http.core.fields import UnsupportedField
from antiphon.gateway.http.core.unsupported import COMMON, EMBEDDING, NOTHING

if TYPE_CHECKING:
    from collections.abc import Mapping

_MEDIA = UnsupportedField("this model accepts text only", NOTHING)
_FLAT = UnsupportedField("logprobs are returned as lists", (False,))
_MASKS = UnsupportedField("sampling masks are not returned", (False,))

GENERATE: Mapping[str, UnsupportedField] = {
    **COMMON,
    "input_embeds": UnsupportedField(
        "embeddings are not accepted as prompts; use text or input_ids"
    ),
    "image_data": _MEDIA,
    "video_data": _MEDIA,
    "audio_data": _MEDIA,
    "mm_hashes": _MEDIA,
    "mm_content_hashes": _MEDIA,
    "modalities": _MEDIA,
    "video_config": _MEDIA,
    "mm_processor_kwargs": _MEDIA,
    "routing_key": UnsupportedField(
        "requests are placed by the scheduler; clients cannot select a worker"
    ),
    "background": UnsupportedField(
        "background generation is not supported by /generate; use /v1/responses", (False,)
    ),
    "external_trace_header": UnsupportedField("set the traceparent header instead", NOTHING),
    "return_flat_raw_top_logprobs": _FLAT,
    "return_flat_raw_output_top_logprobs": _FLAT,
    "return_flat_raw_top_logprobs_b64": _FLAT,
    "routed_experts_start_len": UnsupportedField("expert routing is not recorded", (0, -1)),
    "return_input_ids_in_sglext": UnsupportedField("use return_prompt_token_ids", (False,)),
    "return_output_ids_in_sglext": UnsupportedField("output_ids are always returned", (False,)),
    "return_indexer_topk": _MASKS,
    "return_entropy": _MASKS,
    "return_sampling_mask": _MASKS,
    "sampling_logprobs_mode": UnsupportedField(
        "logprobs are always computed over the whole vocabulary", ("",)
    ),
    "require_reasoning": UnsupportedField(
        "reasoning is not required by this API; use /v1/chat/completions", (False,)
    ),
    "decode_tp_size": UnsupportedField("prefill and decode run in the same worker"),
    "kv_hints": UnsupportedField(
        "requests are placed by the scheduler; clients cannot select a worker", NOTHING
    ),
}

ENCODE: Mapping[str, UnsupportedField] = {
    **EMBEDDING,
    "input_embeds": UnsupportedField(
        "embeddings are not accepted as inputs; use text or input_ids"
    ),
    "image_data": _MEDIA,
    "video_data": _MEDIA,
    "audio_data": _MEDIA,
    "modalities": _MEDIA,
    "sampling_params": UnsupportedField("this API does not sample tokens", NOTHING),
    "is_cross_encoder_request": UnsupportedField("use /v1/rerank for pairs of texts", (False,)),
    "return_pooled_hidden_states": UnsupportedField(
        "the pooled output is always returned", (False,)
    ),
}
