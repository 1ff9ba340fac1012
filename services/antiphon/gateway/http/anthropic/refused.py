"""Fields of Anthropic's bodies that are documented and not served here, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.gateway.http.fields import Refused

if TYPE_CHECKING:
    from collections.abc import Mapping

_NOTHING: tuple[object, ...] = ({}, [], "")
COUNT: Mapping[str, Refused] = {
    "compaction": Refused("conversations are not summarised here"),
    "mcp_servers": Refused("this server calls no other one", _NOTHING),
}

MESSAGES: Mapping[str, Refused] = {
    **COUNT,
    "container": Refused("there are no containers to run code in", _NOTHING),
    "inference_geo": Refused("where a request runs is the scheduler's to say", ("", "global")),
}
