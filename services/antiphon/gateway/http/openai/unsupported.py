"""Documented fields of OpenAI's and SGLang's APIs that this server rejects, each with a reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.gateway.http.core.fields import UnsupportedField

if TYPE_CHECKING:
    from collections.abc import Mapping

_NOTHING: tuple[object, ...] = ({}, [], "")
_ROUTING = UnsupportedField("requests are placed by the scheduler; clients cannot select a worker")
_EXPERTS = UnsupportedField("expert routing is not recorded", (False,))
SESSION_PARAMS = UnsupportedField(
    "not supported by chat completions, which carry the whole conversation; use /generate"
    " or /v1/completions",
    _NOTHING,
)
_MODALITIES = UnsupportedField("this model generates text only", (["text"], []))

COMMON: Mapping[str, UnsupportedField] = {
    "beam_width": UnsupportedField("beam search is not supported", (1,)),
    "watermark": UnsupportedField("watermarks are not supported", (*_NOTHING, {"enabled": False})),
    "return_routed_experts": _EXPERTS,
    "return_spec_tokens_details": UnsupportedField(
        "speculative decoding is not supported", (False,)
    ),
    "lora_path": UnsupportedField("LoRA adapters are not supported", _NOTHING),
    "custom_labels": UnsupportedField("metric labels cannot be set by a request body", _NOTHING),
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
    "functions": UnsupportedField("use tools", _NOTHING),
    "function_call": UnsupportedField("use tool_choice", ("none", "auto")),
    "modalities": _MODALITIES,
    "audio": UnsupportedField("this model generates text only"),
    "prediction": UnsupportedField("predicted outputs are not supported"),
    "web_search_options": UnsupportedField("web search is not supported"),
    "store": UnsupportedField("chat completions are not stored; use /v1/responses", (False,)),
    "service_tier": UnsupportedField("service tiers are not supported", ("auto", "default")),
}

COMPLETION: Mapping[str, UnsupportedField] = {
    **COMMON,
    "max_thinking_tokens": UnsupportedField("only supported by /v1/chat/completions and /generate"),
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
    "instruct": UnsupportedField("a cross-encoder accepts only a query and a document", ("",)),
}
SCORE: Mapping[str, UnsupportedField] = {
    **EMBEDDING,
    "return_token_logprobs": UnsupportedField("use /generate for logprobs", (False,)),
    "score_extraction_token": UnsupportedField("only the next token is scored"),
}
