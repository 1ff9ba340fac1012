"""The tools available to an output, and which of its calls count."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from antiphon.wire.schemas import Json


class OfferedTools(msgspec.Struct, frozen=True, kw_only=True):
    """The tools of a request.

    Attributes:
        schemas: Schema of the arguments of each tool, by name.
        calls_before: Number of earlier calls in the conversation, from which some formats count.
        calls_max: Maximum number of calls; further ones are dropped. None for no limit.
        forward_unknown: Whether calls of unavailable tools count; otherwise they are text.
    """

    schemas: Mapping[str, Json] = {}
    calls_before: int = 0
    calls_max: int | None = None
    forward_unknown: bool = False

    def schema(self, name: str) -> Json:
        """The schema of a tool; None if it is unavailable."""
        if name not in self.schemas:
            return None
        return self.schemas[name] or {}
