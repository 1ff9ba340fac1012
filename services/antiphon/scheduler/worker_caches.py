"""What the prefix caches of the workers hold, by their events: a pure state machine.

Leader and standbys follow alike, so that a new leader knows at once where prompts are cheap. All of
it is a hint: whatever is wrong here costs a prompt computed twice, and the next replay mends it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from antiphon.scheduler.block_index import BlockIndex
from antiphon.wire.kv_events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KvEvents,
    KvReplayed,
    ReplayKv,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from antiphon.wire.base import Process
    from antiphon.wire.kv_events import KvEvent

FULL_REPLAY = -1
"""After this event of a worker no log reaches back: the reply is a snapshot."""
REPLAY_RETRY_S = 1.0
"""When a replay that was not answered is asked for again."""
FULL_REPLAY_RETRY_S = 30.0
"""How long a worker is not asked for all of its blocks again after some were evicted here."""
ROOM_SHARE = 8
"""One in so many blocks must stay free beside a worker's, or the next events would evict again."""
EXPECT_S = 5.0
"""How long a worker is expected to compute what it was given: about as long as it may queue."""


@dataclass(slots=True)
class WorkerCacheState:
    """How far one worker's events are known.

    Attributes:
        seq: The last event that was applied.
        newest: The newest that is known to have happened.
        named: What its last heartbeat named. Heartbeats overtake events, so the next one's coming
            shows whether something was lost.
        snapshot: Number of the snapshot that is being read, while `part` names its next part.
        asked_at: When a replay was asked for that has not come yet.
        whole: All of its blocks are asked for, although none of its events is missing: some blocks
            were evicted here, and there is room for them now.
        whole_at: When they were asked for last.
    """

    seq: int = 0
    newest: int = 0
    named: int = 0
    snapshot: int = 0
    part: int = 0
    requested_at: float | None = None
    whole: bool = False
    whole_at: float = -FULL_REPLAY_RETRY_S

    @property
    def behind(self) -> bool:
        """Whether something is missing."""
        return self.whole or self.newest > self.seq or self.part > 0

    @property
    def next_replay(self) -> ReplayKv:
        """What to ask for."""
        after = FULL_REPLAY if self.whole else self.seq
        return ReplayKv(after=after, snapshot=self.snapshot, part=self.part)


class WorkerCaches:
    """Follows the events of every worker that lives, and asks for what was missed.

    Attributes:
        replays: Replays asked for, since start.
    """

    def __init__(self, blocks_max: int) -> None:
        self.replays = 0
        self._spare = blocks_max // ROOM_SHARE
        self._index = BlockIndex(blocks_max)
        self._followed: dict[Process, WorkerCacheState] = {}

    @property
    def blocks(self) -> int:
        """Blocks known to be held, those of each worker counted."""
        return len(self._index)

    def overlaps(self, digests: bytes) -> dict[Process, int]:
        """How many of a prompt's first blocks each worker holds; who holds none is left out."""
        return self._index.overlaps(digests)

    def on_heartbeat(self, worker: Process, seq: int | None) -> None:
        """A worker's heartbeat names its newest event. It is followed from the first one on.

        One without a number tells of nothing: what it has is not known, and not expected either.
        """
        if seq is None:
            return
        followed = self._followed.get(worker)
        if followed is None:
            self._followed[worker] = WorkerCacheState(newest=seq, named=seq)
            return
        followed.newest = max(followed.newest, followed.named)
        followed.named = seq

    def apply_events(self, message: KvEvents) -> None:
        """Take in events, unless some before them are missing; those are asked for then."""
        followed = self._followed.get(message.worker)
        if followed is None:
            return  # its first heartbeat, which is on the way, says how much there is
        followed.newest = max(followed.newest, message.seq)
        if not followed.part:
            self._apply_next(message.worker, followed, message.seq, message.events)

    def due_replays(self, now: float) -> list[tuple[Process, ReplayKv]]:
        """Whom to ask for what, now. Each answer goes to `replayed`, and so does its failure."""
        due: list[tuple[Process, ReplayKv]] = []
        self._complete(now)
        for worker, followed in self._followed.items():
            waits = (
                followed.requested_at is not None and now - followed.requested_at < REPLAY_RETRY_S
            )
            if followed.behind and not waits:
                followed.requested_at = now
                self.replays += 1
                due.append((worker, followed.next_replay))
        return due

    def _complete(self, now: float) -> None:
        """Ask for all blocks of a worker of which some were evicted, once there is room for them.

        One worker at a time, for they share the room.
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
        """Take in what was asked for. One that has failed is asked for again after a while."""
        followed = self._followed.get(worker)
        if followed is None or reply.worker != worker:
            return
        followed.requested_at = None
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
        """A worker was given a prompt, and will hold its blocks soon."""
        if worker in self._followed:
            self._index.expect(worker, digests, now + EXPECT_S)

    def expire(self, now: float) -> None:
        """Give up expecting what has not come; several times a second."""
        self._index.expire(now)

    def forget(self, worker: Process) -> None:
        """A worker is gone. Its next life begins with an empty cache."""
        self._followed.pop(worker, None)
        self._index.clear(worker)

    def _apply_next(
        self, worker: Process, followed: WorkerCacheState, seq: int, events: tuple[KvEvent, ...]
    ) -> None:
        """Apply those that are new, if they follow what is known."""
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
