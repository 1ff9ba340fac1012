"""Timers of many keys, of which most are dropped long before their time."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

K = TypeVar("K")

_STALE_LEAST = 64  # number of stale timers below which they are not swept


class Timers(Generic[K]):
    """Named timers, earliest first, one time per key. Pure.

    Setting and dropping are cheap; stale entries are skipped later.

    Deadlines are minutes away while requests end soon, so most entries become stale long before
    their time. They are swept when they are the majority, which costs amortized O(1) per `set`.
    """

    def __init__(self) -> None:
        self._at: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._count = 0  # breaks ties, so that keys are never compared

    def set(self, key: K, at: float) -> None:
        self._at[key] = at
        self._count += 1
        heapq.heappush(self._heap, (at, self._count, key))
        if len(self._heap) > 2 * len(self._at) + _STALE_LEAST:
            self._heap = [entry for entry in self._heap if self._at.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)

    def drop(self, key: K) -> None:
        self._at.pop(key, None)

    def armed(self, key: K) -> bool:
        return key in self._at

    def next_at(self) -> float | None:
        while self._heap and self._at.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> K | None:
        at = self.next_at()
        if at is None or at > now:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._at[key]
        return key
