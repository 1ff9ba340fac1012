"""Who goes before whom: the same in the scheduler's queue and in a worker's."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Generic, Self, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from antiphon.config.worker import QueueConfig

W = TypeVar("W")


class PriorityPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What the operator said of priorities.

    Attributes:
        priority: Whether the priority of a request counts.
        low_first: Whether the lower number goes first.
        preempt_threshold: By how much a waiting request must outrank a running one to take its
            place.
        max_overtake_s: How long a request may wait after one that came later was admitted; if it
            has to wait again, because it lost its place, in all.
    """

    priority: bool = False
    low_first: bool = False
    preempt_threshold: int = 10
    max_overtake_s: float = 10.0

    @classmethod
    def from_config(cls, queue: QueueConfig) -> Self:
        """Read it from the settings. The policy `priority` switches priorities on, too."""
        return cls(
            priority=queue.by_priority,
            low_first=queue.low_first,
            preempt_threshold=queue.preempt_threshold,
            max_overtake_s=queue.max_overtake_s,
        )

    def rank(self, priority: int) -> int:
        """The lower goes first; the same for all where priorities do not count."""
        if not self.priority:
            return 0
        return priority if self.low_first else -priority

    def preempts(self, rank: float, running: float) -> bool:
        """Whether a waiting request of one rank takes the place of a running one of another."""
        return running - rank > self.preempt_threshold


class OvertakeTracker(Generic[W]):
    """Who waits while somebody who came later was admitted, and since when.

    Each is looked at once when it is overtaken and once when it leaves, however many wait. Who has
    left meanwhile is passed over, so nobody need say that it leaves.

    Args:
        overtake_s_max: How long is too long.
        waits: Whether somebody still waits, and has not left and come again since.
    """

    def __init__(self, overtake_s_max: float, is_waiting: Callable[[W], bool]) -> None:
        self._overtake_s_max = overtake_s_max
        self._is_waiting = is_waiting
        self._fresh: list[tuple[float, int, W]] = []  # a heap
        self._passed: list[tuple[float, int, W]] = []  # a heap, by the time
        self._numbers = count()

    def enter(self, arrival: float, waiting: W) -> None:
        """Somebody begins to wait, who came then: by any clock, or as any number."""
        heappush(self._fresh, (arrival, next(self._numbers), waiting))

    def overtake(
        self, arrival: float, now: float, before_s: Callable[[W], float] | None = None
    ) -> list[W]:
        """Who came then is admitted: all that wait and came before it are overtaken.

        Args:
            arrival: When it came.
            now: When it is admitted.
            before_s: For how long somebody had been overtaken when it last waited. None: nobody
                waits twice.

        Returns:
            Those who were not overtaken yet since they entered.
        """
        overtaken: list[W] = []
        while self._fresh and self._fresh[0][0] <= arrival:
            came, number, passed = heappop(self._fresh)
            if came != arrival and self._is_waiting(passed):
                since = now - (before_s(passed) if before_s is not None else 0.0)
                heappush(self._passed, (since, number, passed))
                overtaken.append(passed)
        return overtaken

    def pop_overdue(self, now: float) -> Iterator[W]:
        """Those who have been overtaken for too long, the longest first, each once."""
        while self._passed:
            since, _, waiting = self._passed[0]
            waits = self._is_waiting(waiting)
            if waits and now - since < self._overtake_s_max:
                return
            heappop(self._passed)
            if waits:
                yield waiting
