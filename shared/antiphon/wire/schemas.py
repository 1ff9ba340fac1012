"""JSON whose form is another's affair: schemas of tools, arguments of calls, template settings."""

from __future__ import annotations

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
