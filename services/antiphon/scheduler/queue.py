"""The requests that wait for a worker, in order, and how fast they leave."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from antiphon.scheduler.policy import CACHE_WAITING_MAX
from antiphon.service.priority import OvertakeTracker

if TYPE_CHECKING:
    from collections.abc import Iterator, KeysView

    from antiphon.scheduler.policy import QueuePolicy
    from antiphon.wire.ids import RequestId

SchedulerQueueKey = tuple[int, float, float, int]

WINDOW = 64
RETRY_AFTER_MIN_S = 1.0
RETRY_AFTER_MAX_S = 60.0


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """One who waits.

    Attributes:
        place: Rank by priority, standing by the policy, when it came, and its number among those
            that came then.
        digests: Of its prompt's blocks.
    """

    request_id: RequestId
    key: SchedulerQueueKey
    digests: bytes = b""


class SchedulerQueue:
    """By rank, of equals by the policy, and then first come, first served.

    Whoever was overtaken for too long takes turns with those who outrank it: so low priorities get
    half of what a cluster can do at least, and high ones never wait for more than one of them.
    """

    def __init__(self, overtake_s_max: float, policy: QueuePolicy | None = None) -> None:
        self._policy = policy
        self._waiting: dict[RequestId, QueuedRequest] = {}
        self._order: list[QueuedRequest] = []  # by place
        self._overtaken = OvertakeTracker[QueuedRequest](overtake_s_max, self._waits)
        self._overdue: dict[RequestId, None] = {}  # the longest overtaken first
        self._overdue_next = True

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._waiting

    @property
    def request_ids(self) -> KeysView[RequestId]:
        """Who waits, for whoever asks of many: a call for each costs as much as the answer."""
        return self._waiting.keys()

    def put(self, request_id: RequestId, place: SchedulerQueueKey, digests: bytes = b"") -> None:
        """Add at its place. The leader checks the bound before: a request may come back here."""
        waiting = self._waiting[request_id] = QueuedRequest(request_id, place, digests)
        insort(self._order, waiting, key=_place)
        self._overtaken.enter(_came(waiting), waiting)

    def in_order(self, now: float) -> Iterator[RequestId]:
        """Who is next, and who is after that if nobody moves. Good until somebody does."""
        self._overdue.update((one.request_id, None) for one in self._overtaken.pop_overdue(now))
        first = next(iter(self._overdue), None) if self._overdue_next else None
        if first is not None:
            yield first
        yield from (one.request_id for one in self._ordered(now) if one.request_id != first)

    def highest(self) -> RequestId | None:
        """Who is first by its place, whoever has the turn."""
        return self._order[0].request_id if self._order else None

    def start(self, request_id: RequestId, now: float) -> None:
        """Take out one who has got a worker: it overtakes those who came before it."""
        waiting = self._waiting[request_id]
        self._overdue_next = request_id not in self._overdue
        self.remove(request_id)
        self._overtaken.overtake(_came(waiting), now)

    def remove(self, request_id: RequestId) -> None:
        """Take out, wherever it stands. Unknown ids are fine."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            del self._order[bisect_left(self._order, waiting.key, key=_place)]
            self._overdue.pop(request_id, None)

    def position(self, request_id: RequestId) -> int:
        """Count who is before it by their places; 0 also for one that does not wait."""
        waiting = self._waiting.get(request_id)
        return 0 if waiting is None else bisect_left(self._order, waiting.key, key=_place)

    def _ordered(self, now: float) -> list[QueuedRequest]:
        """The requests by their places; within a rank by the cache, if the policy says so."""
        policy = self._policy
        if policy is None or not policy.by_cache or len(self._order) > CACHE_WAITING_MAX:
            return self._order
        numbers = policy.cache_order(((one.request_id, one.digests) for one in self._order), now)
        # Those that came since the caches were looked at go last, in order of arrival.
        last = len(numbers)
        return sorted(self._order, key=lambda one: (one.key[0], numbers.get(one.request_id, last)))

    def _waits(self, waiting: QueuedRequest) -> bool:
        return self._waiting.get(waiting.request_id) is waiting


def _place(waiting: QueuedRequest) -> SchedulerQueueKey:
    return waiting.key


def _came(waiting: QueuedRequest) -> float:
    return waiting.key[2]


class DrainRate:
    """How fast requests leave the queue, from the times of the last ones."""

    def __init__(self) -> None:
        self._left: deque[float] = deque(maxlen=WINDOW)

    def record(self, now: float) -> None:
        """One request has got its worker."""
        self._left.append(now)

    def retry_after_s(self, waiting: int, now: float) -> float:
        """Estimate when a place is free that so many others do not take first.

        With nothing measured yet it is the least.
        """
        if not self._left or waiting == 0:
            return RETRY_AFTER_MIN_S
        # Counted until now, not until the last one left: a queue that stands still gets slower.
        each_s = (now - self._left[0]) / len(self._left)
        return min(max(waiting * each_s, RETRY_AFTER_MIN_S), RETRY_AFTER_MAX_S)
