"""An LRU cache for compiled grammars and compile errors."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

K = TypeVar("K")
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """A map bounded by entries and bytes; evicts the least recently used entry.

    The last entry is never evicted, however large it is: it has just been requested.
    """

    def __init__(
        self, *, entries_max: int, bytes_max: int, size_bytes: Callable[[K, V], int]
    ) -> None:
        self._entries_max = entries_max
        self._bytes_max = bytes_max
        self._size_bytes = size_bytes
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        """The value of a key, marked as just used."""
        value = self._entries.get(key)
        if value is not None:
            self._entries.move_to_end(key)
        return value

    def put(self, key: K, value: V) -> None:
        """Add or replace a value."""
        before = self._entries.pop(key, None)
        if before is not None:
            self._bytes -= self._size_bytes(key, before)
        self._entries[key] = value
        self._bytes += self._size_bytes(key, value)
        while len(self._entries) > 1 and (
            len(self._entries) > self._entries_max or self._bytes > self._bytes_max
        ):
            self._bytes -= self._size_bytes(*self._entries.popitem(last=False))
