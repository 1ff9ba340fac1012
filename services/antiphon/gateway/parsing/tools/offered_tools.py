"""The tools that an answer may call, and which of its calls count."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from antiphon.wire.schemas import Json


class OfferedTools(msgspec.Struct, frozen=True, kw_only=True):
    """What the request offers.

    Attributes:
        schemas: The schema of the arguments of each tool, by name.
        calls_before: Calls in the conversation before this answer; some formats count on.
        calls_max: Most calls; what follows is dropped. None: any number.
        forward_unknown: Whether calls of tools that are not offered count; else they are text.
    """

    schemas: Mapping[str, Json] = {}
    calls_before: int = 0
    calls_max: int | None = None
    forward_unknown: bool = False

    def schema(self, name: str) -> Json:
        """The schema of a tool; None if there is no such tool."""
        if name not in self.schemas:
            return None
        return self.schemas[name] or {}
