"""Fields of SGLang's /generate that are documented and not served here, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.gateway.http.core.fields import UnsupportedField
from antiphon.gateway.http.openai import unsupported as openai

if TYPE_CHECKING:
    from collections.abc import Mapping

_NOTHING: tuple[object, ...] = ({}, [], "")
_MEDIA = UnsupportedField("this model reads text only", _NOTHING)
_FLAT = UnsupportedField("log-probabilities are told as lists", (False,))
_MASKS = UnsupportedField("it is not told of", (False,))

GENERATE: Mapping[str, UnsupportedField] = {
    **openai.COMMON,
    "input_embeds": UnsupportedField("prompts are text or token ids"),
    "image_data": _MEDIA,
    "video_data": _MEDIA,
    "audio_data": _MEDIA,
    "mm_hashes": _MEDIA,
    "mm_content_hashes": _MEDIA,
    "modalities": _MEDIA,
    "video_config": _MEDIA,
    "mm_processor_kwargs": _MEDIA,
    "routing_key": UnsupportedField("where a request runs is the scheduler's to say"),
    "background": UnsupportedField("an answer is told to whoever waits for it", (False,)),
    "external_trace_header": UnsupportedField("say it as the header traceparent", _NOTHING),
    "return_flat_raw_top_logprobs": _FLAT,
    "return_flat_raw_output_top_logprobs": _FLAT,
    "return_flat_raw_top_logprobs_b64": _FLAT,
    "routed_experts_start_len": UnsupportedField(
        "which experts a token went through is not told", (0, -1)
    ),
    "return_input_ids_in_sglext": UnsupportedField("say return_prompt_token_ids", (False,)),
    "return_output_ids_in_sglext": UnsupportedField("the reply has output_ids", (False,)),
    "return_indexer_topk": _MASKS,
    "return_entropy": _MASKS,
    "return_sampling_mask": _MASKS,
    "sampling_logprobs_mode": UnsupportedField(
        "log-probabilities are of the whole vocabulary", ("",)
    ),
    "require_reasoning": UnsupportedField("a chat's form begins behind its thinking", (False,)),
    "decode_tp_size": UnsupportedField("prefill and decode run in one worker"),
    "kv_hints": UnsupportedField("where a request runs is the scheduler's to say", _NOTHING),
}

ENCODE: Mapping[str, UnsupportedField] = {
    **openai.EMBEDDING,
    "input_embeds": UnsupportedField("prompts are text or token ids"),
    "image_data": _MEDIA,
    "video_data": _MEDIA,
    "audio_data": _MEDIA,
    "modalities": _MEDIA,
    "sampling_params": UnsupportedField("nothing is drawn", _NOTHING),
    "is_cross_encoder_request": UnsupportedField("pairs of texts are for /v1/rerank", (False,)),
    "return_pooled_hidden_states": UnsupportedField("they are what is told", (False,)),
}
