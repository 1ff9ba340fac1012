"""Storage of sessions: on the broker, or in the memory of one gateway."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.bus.store import KeyValueStore, StoreLimits
from antiphon.wire.routes import SESSIONS

if TYPE_CHECKING:
    from antiphon.bus.bus import Bus
    from antiphon.config.gateway import SessionsConfig

Key = tuple[str, ...]


class MemorySessionStore:
    """A `KeyValueStore` in this process's memory. Evicts the oldest values beyond `bytes_max`."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._revision = 0
        self._values: dict[Key, tuple[bytes, int]] = {}  # the oldest first

    async def read(self, *key: str) -> tuple[bytes, int] | None:
        return self._values.get(key)

    async def swap(self, *key: str, value: bytes, revision: int) -> bool:
        _, there = self._values.get(key, (b"", 0))
        if there != revision:
            return False
        await self.put(*key, value=value)
        return True

    async def get(self, *key: str) -> bytes | None:
        value, _ = self._values.get(key, (None, 0))
        return value

    async def put(self, *key: str, value: bytes) -> None:
        self._drop(key)
        self._revision += 1
        self._values[key] = (value, self._revision)
        self._bytes += len(value)
        while self._bytes > self._bytes_max:
            self._drop(next(iter(self._values)))

    async def forget(self, *key: str) -> bool:
        there = key in self._values
        for each in [each for each in self._values if each[: len(key)] == key]:
            self._drop(each)
        return there

    def _drop(self, key: Key) -> None:
        value, _ = self._values.pop(key, (b"", 0))
        self._bytes -= len(value)


SessionStore = KeyValueStore | MemorySessionStore


def session_store(config: SessionsConfig, bus: Bus) -> SessionStore:
    if not config.store:
        return MemorySessionStore(config.bytes_max)
    limits = StoreLimits(keep_s=config.keep_s, bytes_max=config.bytes_max, replicas=config.replicas)
    return KeyValueStore(bus, SESSIONS, limits)
