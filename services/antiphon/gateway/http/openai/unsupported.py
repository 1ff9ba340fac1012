"""Documented fields of OpenAI's and SGLang's APIs that this server rejects, each with a reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.gateway.http.core.fields import COMMON, EMBEDDING, NOTHING, UnsupportedField

if TYPE_CHECKING:
    from collections.abc import Mapping

SESSION_PARAMS = UnsupportedField(
    "not supported by chat completions, which carry the whole conversation; use /generate"
    " or /v1/completions",
    NOTHING,
)


CHAT: Mapping[str, UnsupportedField] = {
    **COMMON,
    "session_params": SESSION_PARAMS,
    "functions": UnsupportedField("use tools", NOTHING),
    "function_call": UnsupportedField("use tool_choice", ("none", "auto")),
    "modalities": UnsupportedField("this model generates text only", (["text"], [])),
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

RERANK: Mapping[str, UnsupportedField] = {
    **EMBEDDING,
    "instruct": UnsupportedField("a cross-encoder accepts only a query and a document", ("",)),
}
SCORE: Mapping[str, UnsupportedField] = {
    **EMBEDDING,
    "return_token_logprobs": UnsupportedField("use /generate for logprobs", (False,)),
    "score_extraction_token": UnsupportedField("only the next token is scored"),
}


_ELSEWHERE = UnsupportedField("use /generate, /v1/chat/completions or /v1/completions", (False,))

RESPONSES: Mapping[str, UnsupportedField] = {
    **COMMON,
    "session_params": SESSION_PARAMS,
    "return_cached_tokens_details": UnsupportedField(
        "cached tokens are reported in usage", (False,)
    ),
    "max_thinking_tokens": UnsupportedField("only supported by /v1/chat/completions and /generate"),
    **dict.fromkeys(
        ("rid", "request_id"), UnsupportedField("responses are identified by their id")
    ),
    "conversation": UnsupportedField("conversations are not stored; use previous_response_id"),
    "prompt": UnsupportedField("stored prompts are not supported; use input and instructions"),
    "context_management": UnsupportedField("context compaction is not supported", ([],)),
    "max_tool_calls": UnsupportedField("applies to built-in tools, which are not supported"),
    **dict.fromkeys(
        ("max_tokens", "max_completion_tokens"), UnsupportedField("use max_output_tokens")
    ),
    "n": UnsupportedField("a response has exactly one output", (1,)),
    "response_format": UnsupportedField("use text.format", ({"type": "text"},)),
    "reasoning_effort": UnsupportedField("use reasoning.effort"),
    **dict.fromkeys(("return_hidden_states", "return_meta_info"), _ELSEWHERE),
    **dict.fromkeys(("return_input_ids_in_sglext", "return_output_ids_in_sglext"), _ELSEWHERE),
    "moderation": UnsupportedField("moderation is not supported"),
    "image": UnsupportedField("this model does not generate images"),
    "access_programs": UnsupportedField("access programs are not supported"),
    "prompt_cache_retention": UnsupportedField(
        "cached prefixes are kept as long as there is space", ("in_memory",)
    ),
    "prompt_cache_options": UnsupportedField("prefix caching is automatic", ({},)),
}
