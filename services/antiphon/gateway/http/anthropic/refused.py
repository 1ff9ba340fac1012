"""Fields of Anthropic's bodies that are documented and not served here, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.gateway.http.fields import Refused

if TYPE_CHECKING:
    from collections.abc import Mapping

_NOTHING: tuple[object, ...] = ({}, [], "")
_KEPT = {"type": "clear_thinking_20251015", "keep": "all"}
_UNEDITED: tuple[object, ...] = ({}, {"edits": []}, {"edits": [_KEPT]})

COUNT: Mapping[str, Refused] = {
    "compaction": Refused("conversations are not summarised here"),
    "context_management": Refused("the conversation is used as it is sent", _UNEDITED),
    "mcp_servers": Refused("this server calls no other one", _NOTHING),
    "speed": Refused("there is one speed", ("standard",)),
    "billing_policy": Refused("nothing is billed", ({"type": "billing_policy"},)),
}

MESSAGES: Mapping[str, Refused] = {
    **COUNT,
    "container": Refused("there are no containers to run code in", _NOTHING),
    "diagnostics": Refused("it is not kept what earlier requests had in common", _NOTHING),
    "fallbacks": Refused("one model is served", _NOTHING),
    "fallback_credit_token": Refused("one model is served", _NOTHING),
    "inference_geo": Refused("where a request runs is the scheduler's to say", ("", "global")),
    "thread": Refused("conversations are not kept here: send the messages", _NOTHING),
}
