"""The contents of the workers' prefix caches, from their KV events: a pure state machine.

Leader and standbys follow alike, so that a new leader knows the caches at once. All of it is a
hint: a wrong entry costs a prompt computed twice, and the next replay repairs it.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from antiphon.wire.digests import DIGEST_BYTES, split_digests
from antiphon.wire.kv_events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KvEvent,
    KvEvents,
    KvReplayed,
    ReplayKv,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from antiphon.wire.base import Process


FULL_REPLAY = -1
"""`after` of a replay that no log reaches back to: the reply is a snapshot."""
REPLAY_RETRY_S = 1.0
"""How long until an unanswered replay is requested again."""
FULL_REPLAY_RETRY_S = 30.0
"""Minimum time between two full replays of a worker whose blocks were evicted here."""
ROOM_SHARE = 8
"""One in so many blocks must stay free after a full replay; else the next events evict again."""
EXPECT_S = 5.0
"""How long a bound prompt is expected to be computed: about as long as it may queue there."""


@dataclass(slots=True)
class WorkerCacheState:
    """How far one worker's events are known.

    Attributes:
        seq: The last event that was applied.
        newest: The newest event that is known to exist.
        named: The newest event by its last heartbeat. Heartbeats overtake events, so events count
            as lost only when the next heartbeat arrives.
        snapshot: Number of the snapshot that is being read, while `part` names its next part.
        requested_at: When a replay was requested that has not arrived yet; else in the past.
        whole: All of its blocks are requested, although none of its events is missing: some blocks
            were evicted here, and there is space for them now.
        whole_at: When they were last requested.
    """

    seq: int = 0
    newest: int = 0
    named: int = 0
    snapshot: int = 0
    part: int = 0
    requested_at: float = -REPLAY_RETRY_S
    whole: bool = False
    whole_at: float = -FULL_REPLAY_RETRY_S

    @property
    def behind(self) -> bool:
        return self.whole or self.newest > self.seq or self.part > 0

    @property
    def next_replay(self) -> ReplayKv:
        after = FULL_REPLAY if self.whole else self.seq
        return ReplayKv(after=after, snapshot=self.snapshot, part=self.part)


class WorkerCaches:
    """Follows the events of every live worker, and requests replays of missed ones."""

    def __init__(self, blocks_max: int) -> None:
        self.replays = 0
        self._spare = blocks_max // ROOM_SHARE
        self._index = BlockIndex(blocks_max)
        self._followed: dict[Process, WorkerCacheState] = {}

    @property
    def blocks(self) -> int:
        return len(self._index)

    def overlaps(self, digests: bytes) -> dict[Process, int]:
        """Count the leading blocks of a prompt on each worker; workers with none are left out."""
        return self._index.overlaps(digests)

    def on_heartbeat(self, worker: Process, seq: int | None) -> None:
        """Record the newest event by a worker's heartbeat; the first one starts following it.

        A worker without a number publishes no events: nothing is known or expected of its cache.
        """
        if seq is None:
            return
        if (followed := self._followed.get(worker)) is None:
            self._followed[worker] = WorkerCacheState(newest=seq, named=seq)
            return
        followed.newest = max(followed.newest, followed.named)
        followed.named = seq

    def apply_events(self, message: KvEvents) -> None:
        """Apply events, unless earlier ones are missing; those are then requested."""
        if (followed := self._followed.get(message.worker)) is None:
            return  # its first heartbeat, which is in transit, gives the newest event
        followed.newest = max(followed.newest, message.seq)
        if not followed.part:
            self._apply_next(message.worker, followed, message.seq, message.events)

    def due_replays(self, now: float) -> list[tuple[Process, ReplayKv]]:
        """Return the replays to request now. Each reply goes to `apply_replay`."""
        due: list[tuple[Process, ReplayKv]] = []
        self._complete(now)
        for worker, followed in self._followed.items():
            if followed.behind and now - followed.requested_at >= REPLAY_RETRY_S:
                followed.requested_at = now
                self.replays += 1
                due.append((worker, followed.next_replay))
        return due

    def _complete(self, now: float) -> None:
        """Request all blocks of a worker with evicted ones, once there is space for them.

        One worker at a time, since all share the space.
        """
        partial = self._index.partial
        if not partial or any(followed.whole for followed in self._followed.values()):
            return
        for worker, lacking in partial.items():
            followed = self._followed.get(worker)
            if followed is None or followed.part or now - followed.whole_at < FULL_REPLAY_RETRY_S:
                continue
            if self._index.free >= lacking + self._spare:
                followed.whole, followed.whole_at = True, now
                return

    def apply_replay(self, worker: Process, reply: KvReplayed) -> None:
        """Apply a replay. A failed one is requested again after `REPLAY_RETRY_S`."""
        followed = self._followed.get(worker)
        if followed is None or reply.worker != worker:
            return
        followed.requested_at = -REPLAY_RETRY_S
        followed.newest = max(followed.newest, reply.seq)
        if not reply.snapshot:
            self._apply_next(worker, followed, reply.seq, reply.events)
            return
        self._apply(worker, reply.events)
        followed.whole = False
        followed.snapshot, followed.part = reply.seq, reply.part
        if not reply.part:
            followed.seq = reply.seq

    def expect(self, worker: Process, digests: bytes, now: float) -> None:
        if worker in self._followed:
            self._index.expect(worker, digests, now + EXPECT_S)

    def expire(self, now: float) -> None:
        """Drop expected blocks that were not reported in time; called several times a second."""
        self._index.expire(now)

    def forget(self, worker: Process) -> None:
        """Drop the state of a dead worker. Its next incarnation starts with an empty cache."""
        self._followed.pop(worker, None)
        self._index.clear(worker)

    def _apply_next(
        self, worker: Process, followed: WorkerCacheState, seq: int, events: tuple[KvEvent, ...]
    ) -> None:
        """Apply the new events of a message, if there is no gap before them."""
        before = seq - len(events)
        if before <= followed.seq < seq:
            self._apply(worker, events[followed.seq - before :])
            followed.seq = seq

    def _apply(self, worker: Process, events: Iterable[KvEvent]) -> None:
        for event in events:
            match event:
                case BlocksStored():
                    self._index.store(worker, event.digests)
                case BlocksRemoved():
                    self._index.remove(worker, event.digests)
                case BlocksCleared():
                    self._index.clear(worker)


class BlockIndex:
    """Blocks by digest, with one bit per worker.

    One lookup serves all workers, in as many steps as the prompt has blocks. The index holds at
    most `blocks_max` entries, counted per worker. One more evicts the least recently used block of
    the worker with most blocks; a matched prefix may then be shorter than the real one, never
    longer. That worker is partial until all its blocks are stored again: see `partial`.

    Besides reported blocks, the index holds for a while the blocks that a worker is expected to
    hold soon, so that a burst of prompts with a common prefix does not spread over all workers
    before the first of them is computed. A partial worker may hold such a block already and report
    nothing: for partial workers expected blocks do not expire.
    """

    def __init__(self, blocks_max: int) -> None:
        # Workers that hold blocks which were evicted from the index, and about how many.
        self.partial: dict[Process, int] = {}
        self._blocks_max = blocks_max
        self._holders: dict[bytes, int] = {}
        self._bits: dict[Process, int] = {}
        self._workers: dict[int, Process] = {}
        # Per worker, the least recently used first.
        self._blocks: defaultdict[Process, OrderedDict[bytes, None]] = defaultdict(OrderedDict)
        self._expected: OrderedDict[tuple[Process, bytes], float] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def overlaps(self, digests: bytes) -> dict[Process, int]:
        found: dict[Process, int] = {}
        holding = -1
        for index, digest in enumerate(split_digests(digests)):
            still = holding & self._holders.get(digest, 0)
            if index and still != holding:
                found |= dict.fromkeys(self._named(holding & ~still), index)
            holding = still
            if not holding:
                return found
        if holding > 0:
            found |= dict.fromkeys(self._named(holding), len(digests) // DIGEST_BYTES)
        return found

    @property
    def free(self) -> int:
        return self._blocks_max - self._count

    def store(self, worker: Process, digests: bytes) -> None:
        # In reverse: without its first blocks a prompt is not found, so they are evicted last.
        for digest in reversed(list(split_digests(digests))):
            self._expected.pop((worker, digest), None)
            self._put(worker, digest)

    def expect(self, worker: Process, digests: bytes, until: float) -> None:
        """Add blocks that a worker will use soon. They expire unless reported by `until`.

        `until` must not decrease from call to call.
        """
        for digest in reversed(list(split_digests(digests))):
            name = (worker, digest)
            known = digest in self._blocks.get(worker, ())
            self._put(worker, digest)
            if name in self._expected or not known:
                self._expected[name] = until
                self._expected.move_to_end(name)

    def expire(self, now: float) -> None:
        while self._expected and (name := next(iter(self._expected))):
            if self._expected[name] > now:
                return
            del self._expected[name]
            if name[0] in self.partial:
                self._regain(name[0])
            else:
                self._drop(*name)

    def remove(self, worker: Process, digests: bytes) -> None:
        for digest in split_digests(digests):
            self._expected.pop((worker, digest), None)
            if not self._drop(worker, digest):
                self._regain(worker)

    def clear(self, worker: Process) -> None:
        """Remove all blocks of a worker: its cache was cleared, or the worker is gone."""
        self.partial.pop(worker, None)
        for digest in self._blocks.pop(worker, ()):
            self._expected.pop((worker, digest), None)
            self._unmark(worker, digest)
        self._workers.pop(self._bits.pop(worker, 0), None)

    def _put(self, worker: Process, digest: bytes) -> None:
        """Add a block as the most recently used one of its worker."""
        known = self._blocks[worker]
        if digest in known:
            known.move_to_end(digest)
            return
        if self._count >= self._blocks_max:
            self._evict()
        known[digest] = None
        self._holders[digest] = self._holders.get(digest, 0) | self._bit(worker)
        self._count += 1

    def _evict(self) -> None:
        worker = max(self._blocks, key=lambda each: len(self._blocks[each]))
        digest = next(iter(self._blocks[worker]))
        if self._expected.pop((worker, digest), None) is None:
            self.partial[worker] = self.partial.get(worker, 0) + 1
        self._drop(worker, digest)

    def _regain(self, worker: Process) -> None:
        """One of the evicted blocks has left its worker."""
        if self.partial.get(worker):
            self.partial[worker] -= 1

    def _drop(self, worker: Process, digest: bytes) -> bool:
        if digest not in self._blocks.get(worker, ()):
            return False
        del self._blocks[worker][digest]
        self._unmark(worker, digest)
        return True

    def _unmark(self, worker: Process, digest: bytes) -> None:
        left = self._holders[digest] & ~self._bits[worker]
        if left:
            self._holders[digest] = left
        else:
            del self._holders[digest]
        self._count -= 1

    def _bit(self, worker: Process) -> int:
        if (bit := self._bits.get(worker)) is None:
            bit = 1
            while bit in self._workers:
                bit <<= 1
            self._bits[worker] = bit
            self._workers[bit] = worker
        return bit

    def _named(self, bits: int) -> Iterator[Process]:
        while bits:
            bit = bits & -bits
            bits -= bit
            yield self._workers[bit]
