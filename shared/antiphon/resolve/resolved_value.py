from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")


class ResolvedValue(msgspec.Struct, Generic[T], frozen=True):
    value: T
    reason: str
