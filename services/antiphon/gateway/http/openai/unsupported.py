"""Fields of OpenAI's and SGLang's bodies that are documented and not served here, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.gateway.http.core.fields import UnsupportedField

if TYPE_CHECKING:
    from collections.abc import Mapping

_NOTHING: tuple[object, ...] = ({}, [], "")
_ROUTING = UnsupportedField("where a request runs is the scheduler's to say")
_EXPERTS = UnsupportedField("which experts a token went through is not told", (False,))
SESSION_PARAMS = UnsupportedField(
    "a chat brings all of its turns; /generate and /v1/completions go on in sessions", _NOTHING
)
_MODALITIES = UnsupportedField("this model answers in text", (["text"], []))

COMMON: Mapping[str, UnsupportedField] = {
    "beam_width": UnsupportedField("beam search is not built", (1,)),
    "watermark": UnsupportedField("watermarks are not built", (*_NOTHING, {"enabled": False})),
    "return_routed_experts": _EXPERTS,
    "return_spec_tokens_details": UnsupportedField(
        "speculative decoding is not built yet", (False,)
    ),
    "lora_path": UnsupportedField("LoRA adapters are not built yet", _NOTHING),
    "custom_labels": UnsupportedField("metric labels are fixed", _NOTHING),
    "bootstrap_host": _ROUTING,
    "bootstrap_port": _ROUTING,
    "bootstrap_room": _ROUTING,
    "bootstrap_pair_key": _ROUTING,
    "disagg_prefill_dp_rank": _ROUTING,
    "routed_dp_rank": _ROUTING,
    "data_parallel_rank": _ROUTING,
}

CHAT: Mapping[str, UnsupportedField] = {
    **COMMON,
    "session_params": SESSION_PARAMS,
    "functions": UnsupportedField("say tools", _NOTHING),
    "function_call": UnsupportedField("say tool_choice", ("none", "auto")),
    "modalities": _MODALITIES,
    "audio": UnsupportedField("this model answers in text"),
    "prediction": UnsupportedField("predicted outputs are not built"),
    "web_search_options": UnsupportedField("there is no web search"),
    "store": UnsupportedField("chats are not stored", (False,)),
    "service_tier": UnsupportedField("there are no tiers", ("auto", "default")),
}

COMPLETION: Mapping[str, UnsupportedField] = {
    **COMMON,
    "max_thinking_tokens": UnsupportedField("it is of chats and of /generate"),
}

EMBEDDING: Mapping[str, UnsupportedField] = {
    name: COMMON[name]
    for name in (
        *("lora_path", "custom_labels"),
        *("routed_dp_rank", "data_parallel_rank"),
        *("bootstrap_host", "bootstrap_port", "bootstrap_room"),
    )
}
RERANK: Mapping[str, UnsupportedField] = {
    **EMBEDDING,
    "instruct": UnsupportedField(
        "a cross-encoder takes a query and a document, and no more", ("",)
    ),
}
SCORE: Mapping[str, UnsupportedField] = {
    **EMBEDDING,
    "return_token_logprobs": UnsupportedField("/generate tells them", (False,)),
    "score_extraction_token": UnsupportedField(
        "what would come next is scored, and no other place"
    ),
}
