"""Type of free-form JSON: tool schemas, call arguments, template variables."""

from __future__ import annotations

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
