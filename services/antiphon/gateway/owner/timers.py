"""Named times to wake at, earliest first. Pure: it is told the time."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

K = TypeVar("K")


_STALE_LEAST = 64
"""Stale entries that are not worth a sweep."""


class Timers(Generic[K]):
    """At most one time a key. Setting and dropping are cheap; a stale entry is skipped later.

    Deadlines are minutes away and requests end in a moment, so most entries get stale long before
    their time. They are swept out when they are the greater part: that costs O(1) a `set`.
    """

    def __init__(self) -> None:
        self._at: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._count = 0  # breaks ties, so that keys are never compared

    def set(self, key: K, at: float) -> None:
        """Wake `key` at a time, and not at the one that it had."""
        self._at[key] = at
        self._count += 1
        heapq.heappush(self._heap, (at, self._count, key))
        if len(self._heap) > 2 * len(self._at) + _STALE_LEAST:
            self._heap = [entry for entry in self._heap if self._at.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)

    def drop(self, key: K) -> None:
        """Do not wake `key`."""
        self._at.pop(key, None)

    def armed(self, key: K) -> bool:
        """Whether `key` will be woken."""
        return key in self._at

    def next_at(self) -> float | None:
        """The earliest time, if anything waits."""
        while self._heap and self._at.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> K | None:
        """Take one key whose time has come."""
        at = self.next_at()
        if at is None or at > now:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._at[key]
        return key
