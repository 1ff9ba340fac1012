"""Fields of a response's body that are documented and not served here, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.gateway.http.fields import Refused
from antiphon.gateway.http.openai.refused import COMMON, SESSION_PARAMS

if TYPE_CHECKING:
    from collections.abc import Mapping

_ELSEWHERE = Refused("it is told by /generate and by completions", (False,))
_NAMES = Refused("a response is called by its id")

RESPONSES: Mapping[str, Refused] = {
    **COMMON,
    "session_params": SESSION_PARAMS,
    "return_cached_tokens_details": Refused("usage tells of cached tokens", (False,)),
    "max_thinking_tokens": Refused("it is of chats and of /generate"),
    "rid": _NAMES,
    "request_id": _NAMES,
    "conversation": Refused("conversations are not stored: say previous_response_id"),
    "prompt": Refused("there are no stored prompts: say input and instructions"),
    "context_management": Refused("contexts are not compacted", ([],)),
    "max_tool_calls": Refused("it is of built-in tools, and there are none"),
    "max_tokens": Refused("say max_output_tokens"),
    "max_completion_tokens": Refused("say max_output_tokens"),
    "n": Refused("a response is one answer", (1,)),
    "response_format": Refused("use text.format", ({"type": "text"},)),
    "reasoning_effort": Refused("say reasoning.effort"),
    "return_hidden_states": _ELSEWHERE,
    "return_meta_info": _ELSEWHERE,
    "return_input_ids_in_sglext": _ELSEWHERE,
    "return_output_ids_in_sglext": _ELSEWHERE,
    "moderation": Refused("answers are not moderated"),
    "image": Refused("this model makes no images"),
    "access_programs": Refused("there are none"),
    "prompt_cache_retention": Refused("prefixes stay as long as there is room", ("in_memory",)),
    "prompt_cache_options": Refused("prefixes are found without them", ({},)),
}
