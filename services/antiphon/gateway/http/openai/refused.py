"""Fields of OpenAI's and SGLang's bodies that are documented and not served here, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.gateway.http.fields import Refused

if TYPE_CHECKING:
    from collections.abc import Mapping

_NOTHING: tuple[object, ...] = ({}, [], "")
_ROUTING = Refused("where a request runs is the scheduler's to say")
_EXPERTS = Refused("which experts a token went through is not told", (False,))
SESSION_PARAMS = Refused(
    "a chat brings all of its turns; /generate and /v1/completions go on in sessions", _NOTHING
)
_MODALITIES = Refused("this model answers in text", (["text"], []))

COMMON: Mapping[str, Refused] = {
    "beam_width": Refused("beam search is not built", (1,)),
    "watermark": Refused("watermarks are not built", (*_NOTHING, {"enabled": False})),
    "return_routed_experts": _EXPERTS,
    "return_spec_tokens_details": Refused("speculative decoding is not built yet", (False,)),
    "lora_path": Refused("LoRA adapters are not built yet", _NOTHING),
    "custom_labels": Refused("metric labels are fixed", _NOTHING),
    "bootstrap_host": _ROUTING,
    "bootstrap_port": _ROUTING,
    "bootstrap_room": _ROUTING,
    "bootstrap_pair_key": _ROUTING,
    "disagg_prefill_dp_rank": _ROUTING,
    "routed_dp_rank": _ROUTING,
    "data_parallel_rank": _ROUTING,
}

CHAT: Mapping[str, Refused] = {
    **COMMON,
    "session_params": SESSION_PARAMS,
    "functions": Refused("say tools", _NOTHING),
    "function_call": Refused("say tool_choice", ("none", "auto")),
    "modalities": _MODALITIES,
    "audio": Refused("this model answers in text"),
    "prediction": Refused("predicted outputs are not built"),
    "web_search_options": Refused("there is no web search"),
    "store": Refused("chats are not stored", (False,)),
    "service_tier": Refused("there are no tiers", ("auto", "default")),
}

COMPLETION: Mapping[str, Refused] = {
    **COMMON,
    "max_thinking_tokens": Refused("it is of chats and of /generate"),
}

EMBEDDING: Mapping[str, Refused] = {
    name: COMMON[name]
    for name in (
        *("lora_path", "custom_labels"),
        *("routed_dp_rank", "data_parallel_rank"),
        *("bootstrap_host", "bootstrap_port", "bootstrap_room"),
    )
}
RERANK: Mapping[str, Refused] = {
    **EMBEDDING,
    "instruct": Refused("a cross-encoder takes a query and a document, and no more", ("",)),
}
SCORE: Mapping[str, Refused] = {
    **EMBEDDING,
    "return_token_logprobs": Refused("/generate tells them", (False,)),
    "score_extraction_token": Refused("what would come next is scored, and no other place"),
}
