"""Priority policy, shared by the queues of the scheduler and the worker."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Generic, Self, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from antiphon.config.worker import QueueConfig

W = TypeVar("W")

_ENTRIES_LEAST = 64
"""Number of entries below which none are swept."""


class PriorityPolicy(msgspec.Struct, frozen=True, kw_only=True):
    priority: bool = False  # whether priority scheduling is enabled
    low_first: bool = False  # whether lower values run first
    # Minimum difference in rank for a waiting request to preempt a running one.
    preempt_threshold: int = 10
    # Maximum time a request waits after a later one was admitted, in total if it waits several
    # times because of preemption.
    max_overtake_s: float = 10.0

    @classmethod
    def from_config(cls, queue: QueueConfig) -> Self:
        """Create from the settings. The queue policy `priority` enables it, too."""
        return cls(
            priority=queue.by_priority,
            low_first=queue.low_first,
            preempt_threshold=queue.preempt_threshold,
            max_overtake_s=queue.max_overtake_s,
        )

    def rank(self, priority: int) -> int:
        """Return the rank of a priority, lower first; 0 for all if priorities are disabled."""
        if not self.priority:
            return 0
        return priority if self.low_first else -priority

    def preempts(self, rank: float, running: float) -> bool:
        """Whether a waiting request of `rank` preempts a running one of rank `running`."""
        return running - rank > self.preempt_threshold


class OvertakeTracker(Generic[W]):
    """Tracks waiting requests that were overtaken by later ones, and since when.

    Each request is processed once when it is overtaken and once when it leaves, however many wait.
    Requests that stopped waiting are skipped, so their removal needs no call: `is_waiting` returns
    whether an entry still waits, and has not left and been added again since. While none are
    admitted, none are overtaken, and those that left are swept: entries are at most twice as many
    as requests that waited at the last sweep, which costs amortized O(1) per `enter`.
    """

    def __init__(self, overtake_s_max: float, is_waiting: Callable[[W], bool]) -> None:
        self._overtake_s_max = overtake_s_max
        self._is_waiting = is_waiting
        self._fresh: list[tuple[float, int, W]] = []  # a heap
        self._passed: list[tuple[float, int, W]] = []  # a heap, by the time
        self._numbers = count()
        self._swept_at = _ENTRIES_LEAST

    def __len__(self) -> int:
        """Number of entries, those included that stopped waiting."""
        return len(self._fresh) + len(self._passed)

    def enter(self, arrival: float, waiting: W) -> None:
        """Add a waiting request; `arrival` is its time by any clock, or any increasing number."""
        if len(self) >= self._swept_at:
            self._sweep()
        heappush(self._fresh, (arrival, next(self._numbers), waiting))

    def overtake(
        self, arrival: float, now: float, before_s: Callable[[W], float] | None = None
    ) -> list[W]:
        """Record an admission: all waiting requests that arrived before `arrival` are overtaken.

        `before_s` returns for how long a request had been overtaken when it waited before; unset:
        no request waits twice. Returns the newly overtaken requests.
        """
        overtaken: list[W] = []
        while self._fresh and self._fresh[0][0] <= arrival:
            arrived, number, passed = heappop(self._fresh)
            if arrived != arrival and self._is_waiting(passed):
                since = now - (before_s(passed) if before_s is not None else 0.0)
                heappush(self._passed, (since, number, passed))
                overtaken.append(passed)
        return overtaken

    def pop_overdue(self, now: float) -> Iterator[W]:
        """Yield the requests that have been overtaken for too long, longest first, each once."""
        while self._passed:
            since, _, waiting = self._passed[0]
            waits = self._is_waiting(waiting)
            if waits and now - since < self._overtake_s_max:
                return
            heappop(self._passed)
            if waits:
                yield waiting

    def _sweep(self) -> None:
        """Drop the entries of requests that stopped waiting."""
        for heap in (self._fresh, self._passed):
            heap[:] = [entry for entry in heap if self._is_waiting(entry[2])]
            heapify(heap)
        self._swept_at = max(_ENTRIES_LEAST, 2 * len(self))
