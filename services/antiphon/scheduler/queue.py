"""The queue of requests that wait for a worker: their order, and the rate at which they leave.

Pure, the clock passed in. A worker applies the same policies to the requests bound to it. The
leader's view of caches is coarser: 64-token blocks that some worker is known to hold, or to hold
soon.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections import Counter, deque
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from antiphon.config.worker import Policy
from antiphon.service.priority import OvertakeTracker
from antiphon.wire.digests import DIGEST_BYTES, split_digests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, KeysView

    from antiphon.wire.base import Process
    from antiphon.wire.ids import RequestId
    from antiphon.wire.submit import SubmitRequest


CACHE_POLICIES = frozenset({Policy.LPM, Policy.DFS_WEIGHT})
"""Policies that order by the contents of the workers' prefix caches."""

CACHE_WAITING_MAX = 128
"""With more waiting requests the cache policies fall back to arrival, as in SGLang: repeated
lookups of each prompt would cost more than a good order saves."""

REFRESH_S = 0.05
"""How old an order by cache may be. A prompt of 32 Ki tokens takes 512 lookups."""

Key = tuple[tuple[int, int], ...]

STOP = (1, 0)
"""Sorts after every branch."""


WINDOW = 64
RETRY_AFTER_MIN_S = 1.0
RETRY_AFTER_MAX_S = 60.0


class QueuePolicy:
    """Orders the leader's queue within one rank; the queue itself handles rank and fairness.

    `overlaps` counts the leading blocks of a prompt on each worker.
    """

    def __init__(self, policy: Policy, overlaps: Callable[[bytes], dict[Process, int]]) -> None:
        self._policy = policy
        self._overlaps = overlaps
        # A fixed seed: any random order is as good, and a simulation is reproducible.
        self._random = random.Random(0)  # noqa: S311
        self._order: dict[RequestId, int] = {}
        self._refreshed_at: float | None = None

    @property
    def by_cache(self) -> bool:
        return self._policy in CACHE_POLICIES

    def static_key(self, submit: SubmitRequest) -> float:
        """A request's fixed sort key within its rank; the lowest is next."""
        match self._policy:
            case Policy.LOF:
                return -submit.sampling.max_new_tokens
            case Policy.RANDOM:
                return self._random.random()
            case _:
                return 0.0

    def cache_order(
        self, waiting: Iterable[tuple[RequestId, bytes]], now: float
    ) -> dict[RequestId, int]:
        """Rank waiting requests, given in order of arrival, by the cache, lowest first.

        A result is reused for `REFRESH_S`; requests that arrive meanwhile are missing from it.
        """
        if self._refreshed_at is None or now - self._refreshed_at >= REFRESH_S:
            self._refreshed_at = now
            cached = [(name, self._cached(digests)) for name, digests in waiting]
            key = _depth_first(cached) if self._policy is Policy.DFS_WEIGHT else _longest_first
            names = [name for name, _ in sorted(cached, key=key)]
            self._order = {name: index for index, name in enumerate(names)}
        return self._order

    def _cached(self, digests: bytes) -> list[bytes]:
        """The longest prefix of a prompt's blocks that some worker holds."""
        most = max(self._overlaps(digests).values(), default=0)
        return list(split_digests(digests[: most * DIGEST_BYTES]))


def _longest_first(cached: tuple[RequestId, list[bytes]]) -> int:
    return -len(cached[1])


def _depth_first(
    waiting: list[tuple[RequestId, list[bytes]]],
) -> Callable[[tuple[RequestId, list[bytes]]], Key]:
    """Order by depth-first traversal of the blocks, the branches with most requests first.

    A digest names a whole prefix, so the digests of a prompt are its path from the root. Prompts
    that end at a block come after those that continue below it, which share more.
    """
    weights = Counter(digest for _, path in waiting for digest in path)
    first = {digest: index for index, digest in enumerate(weights)}

    def key(cached: tuple[RequestId, list[bytes]]) -> Key:
        branches: list[tuple[int, int]] = []
        weight = 0
        for digest in cached[1]:
            if weights[digest] != weight:  # without a branch, a block adds no information
                weight = weights[digest]
                branches.append((-weight, first[digest]))
        return (*branches, STOP)

    return key


SchedulerQueueKey = tuple[int, float, float, int]


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """`key` is rank by priority, key by the policy, time of arrival, and number among equals."""

    request_id: RequestId
    key: SchedulerQueueKey
    digests: bytes = b""


class SchedulerQueue:
    """Ordered by rank, then by the policy, then first come, first served.

    A request that was overtaken for too long alternates with the requests that outrank it: so low
    priorities get at least half of the cluster, and a high-priority request never waits for more
    than one of them.
    """

    def __init__(self, overtake_s_max: float, policy: QueuePolicy) -> None:
        self._policy = policy
        self._waiting: dict[RequestId, QueuedRequest] = {}
        self._order: list[QueuedRequest] = []  # by key
        self._overtaken = OvertakeTracker[QueuedRequest](overtake_s_max, self._waits)
        self._overdue: dict[RequestId, None] = {}  # the longest overtaken first
        self._overdue_next = True

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._waiting

    @property
    def request_ids(self) -> KeysView[RequestId]:
        """The waiting requests, for lookups in bulk: one call per id would double their cost."""
        return self._waiting.keys()

    def put(self, request_id: RequestId, key: SchedulerQueueKey, digests: bytes = b"") -> None:
        """Add a request. The leader checks the limit before, since requests may be requeued."""
        waiting = self._waiting[request_id] = QueuedRequest(request_id, key, digests)
        insort(self._order, waiting, key=_key)
        self._overtaken.enter(_arrival(waiting), waiting)

    def in_order(self, now: float) -> Iterator[RequestId]:
        """Iterate over the requests in the order they would leave; invalidated by any change."""
        self._overdue.update((one.request_id, None) for one in self._overtaken.pop_overdue(now))
        first = next(iter(self._overdue), None) if self._overdue_next else None
        if first is not None:
            yield first
        yield from (one.request_id for one in self._ordered(now) if one.request_id != first)

    def highest(self) -> RequestId | None:
        return self._order[0].request_id if self._order else None

    def start(self, request_id: RequestId, now: float) -> None:
        """Remove a request that was bound: it overtakes those that arrived before it."""
        waiting = self._waiting[request_id]
        self._overdue_next = request_id not in self._overdue
        self.remove(request_id)
        self._overtaken.overtake(_arrival(waiting), now)

    def remove(self, request_id: RequestId) -> None:
        if (waiting := self._waiting.pop(request_id, None)) is not None:
            del self._order[bisect_left(self._order, waiting.key, key=_key)]
            self._overdue.pop(request_id, None)

    def position(self, request_id: RequestId) -> int:
        """Count the requests before it by key; 0 also for one that does not wait."""
        waiting = self._waiting.get(request_id)
        return 0 if waiting is None else bisect_left(self._order, waiting.key, key=_key)

    def _ordered(self, now: float) -> list[QueuedRequest]:
        """The requests by key; within a rank by the cache, for a cache policy."""
        if not self._policy.by_cache or len(self._order) > CACHE_WAITING_MAX:
            return self._order
        waiting = ((one.request_id, one.digests) for one in self._order)
        numbers = self._policy.cache_order(waiting, now)
        # Requests that arrived since the last lookup go last, in order of arrival.
        last = len(numbers)
        return sorted(self._order, key=lambda one: (one.key[0], numbers.get(one.request_id, last)))

    def _waits(self, waiting: QueuedRequest) -> bool:
        return self._waiting.get(waiting.request_id) is waiting


_key = attrgetter("key")


def _arrival(waiting: QueuedRequest) -> float:
    return waiting.key[2]


class DrainRate:
    """Rate at which requests leave the queue, from the times of the last ones."""

    def __init__(self) -> None:
        self._left: deque[float] = deque(maxlen=WINDOW)

    def record(self, now: float) -> None:
        self._left.append(now)

    def retry_after_s(self, waiting: int, now: float) -> float:
        """Estimate when the queue has drained; the minimum while nothing is measured."""
        if not self._left or waiting == 0:
            return RETRY_AFTER_MIN_S
        # Measured until now, not until the last exit: a stalled queue gets slower.
        each_s = (now - self._left[0]) / len(self._left)
        return min(max(waiting * each_s, RETRY_AFTER_MIN_S), RETRY_AFTER_MAX_S)
