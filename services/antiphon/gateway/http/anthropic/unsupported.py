"""Documented fields of the Messages API that this server rejects, each with a reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.gateway.http.core.fields import UnsupportedField

if TYPE_CHECKING:
    from collections.abc import Mapping

_NOTHING: tuple[object, ...] = ({}, [], "")
COUNT: Mapping[str, UnsupportedField] = {
    "compaction": UnsupportedField("compaction of conversations is not supported"),
    "mcp_servers": UnsupportedField("MCP servers are not supported", _NOTHING),
}

MESSAGES: Mapping[str, UnsupportedField] = {
    **COUNT,
    "container": UnsupportedField("containers for code execution are not supported", _NOTHING),
    "inference_geo": UnsupportedField(
        "requests are placed by the scheduler; clients cannot select a worker", ("", "global")
    ),
}
