"""Fields of Anthropic's bodies that are documented and not served here, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.gateway.http.core.fields import UnsupportedField

if TYPE_CHECKING:
    from collections.abc import Mapping

_NOTHING: tuple[object, ...] = ({}, [], "")
COUNT: Mapping[str, UnsupportedField] = {
    "compaction": UnsupportedField("conversations are not summarised here"),
    "mcp_servers": UnsupportedField("this server calls no other one", _NOTHING),
}

MESSAGES: Mapping[str, UnsupportedField] = {
    **COUNT,
    "container": UnsupportedField("there are no containers to run code in", _NOTHING),
    "inference_geo": UnsupportedField(
        "where a request runs is the scheduler's to say", ("", "global")
    ),
}
