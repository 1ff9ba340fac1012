"""The metaclass of configuration and messages: frozen and keyword-only structs."""

from __future__ import annotations

from typing import dataclass_transform

import msgspec


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
class FrozenMeta(msgspec.StructMeta):
    """Makes each subclass frozen and keyword-only; msgspec alone inherits only the first."""

    def __new__(
        cls, name: str, bases: tuple[type, ...], namespace: dict[str, object], **options: object
    ) -> FrozenMeta:
        options = {"frozen": True, "kw_only": True, **options}
        return super().__new__(cls, name, bases, namespace, **options)  # pyright: ignore[reportArgumentType]  # passed through
