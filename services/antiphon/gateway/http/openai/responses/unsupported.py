"""Fields of a response's body that are documented and not served here, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.gateway.http.core.fields import UnsupportedField
from antiphon.gateway.http.openai.unsupported import COMMON, SESSION_PARAMS

if TYPE_CHECKING:
    from collections.abc import Mapping

_ELSEWHERE = UnsupportedField("it is told by /generate and by completions", (False,))
_NAMES = UnsupportedField("a response is called by its id")

RESPONSES: Mapping[str, UnsupportedField] = {
    **COMMON,
    "session_params": SESSION_PARAMS,
    "return_cached_tokens_details": UnsupportedField("usage tells of cached tokens", (False,)),
    "max_thinking_tokens": UnsupportedField("it is of chats and of /generate"),
    "rid": _NAMES,
    "request_id": _NAMES,
    "conversation": UnsupportedField("conversations are not stored: say previous_response_id"),
    "prompt": UnsupportedField("there are no stored prompts: say input and instructions"),
    "context_management": UnsupportedField("contexts are not compacted", ([],)),
    "max_tool_calls": UnsupportedField("it is of built-in tools, and there are none"),
    "max_tokens": UnsupportedField("say max_output_tokens"),
    "max_completion_tokens": UnsupportedField("say max_output_tokens"),
    "n": UnsupportedField("a response is one answer", (1,)),
    "response_format": UnsupportedField("use text.format", ({"type": "text"},)),
    "reasoning_effort": UnsupportedField("say reasoning.effort"),
    "return_hidden_states": _ELSEWHERE,
    "return_meta_info": _ELSEWHERE,
    "return_input_ids_in_sglext": _ELSEWHERE,
    "return_output_ids_in_sglext": _ELSEWHERE,
    "moderation": UnsupportedField("answers are not moderated"),
    "image": UnsupportedField("this model makes no images"),
    "access_programs": UnsupportedField("there are none"),
    "prompt_cache_retention": UnsupportedField(
        "prefixes stay as long as there is room", ("in_memory",)
    ),
    "prompt_cache_options": UnsupportedField("prefixes are found without them", ({},)),
}
