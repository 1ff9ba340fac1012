"""Documented fields of OpenAI's and SGLang's APIs that this server rejects, each with a reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.gateway.http.core.fields import UnsupportedField
from antiphon.gateway.http.core.unsupported import COMMON, EMBEDDING, NOTHING

if TYPE_CHECKING:
    from collections.abc import Mapping

SESSION_PARAMS = UnsupportedField(
    "not supported by chat completions, which carry the whole conversation; use /generate"
    " or /v1/completions",
    NOTHING,
)
_MODALITIES = UnsupportedField("this model generates text only", (["text"], []))

CHAT: Mapping[str, UnsupportedField] = {
    **COMMON,
    "session_params": SESSION_PARAMS,
    "functions": UnsupportedField("use tools", NOTHING),
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

RERANK: Mapping[str, UnsupportedField] = {
    **EMBEDDING,
    "instruct": UnsupportedField("a cross-encoder accepts only a query and a document", ("",)),
}
SCORE: Mapping[str, UnsupportedField] = {
    **EMBEDDING,
    "return_token_logprobs": UnsupportedField("use /generate for logprobs", (False,)),
    "score_extraction_token": UnsupportedField("only the next token is scored"),
}
