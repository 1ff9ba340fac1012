"""What a worker tells of its cache: which blocks of 64 tokens came and went, in order."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

BLOCKS_MAX = 1024
"""Blocks of one event: 64 Ki tokens, 32 KiB of digests. A longer prompt is told of in several."""


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """All pages of these blocks are in the cache now. They follow each other.

    Attributes:
        parent: Digest of the block before the first, or the root of the namespace.
        blocks: Their digests, each chained from the one before.
    """

    parent: bytes
    blocks: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class RemovedEvent:
    """A page of each of these blocks is gone."""

    blocks: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class ClearedEvent:
    """Every block is gone."""


CacheEvent = StoredEvent | RemovedEvent | ClearedEvent


class BlockTracker:
    """The blocks that a tree of pages can serve; each is announced when stored and when removed.

    Where a page is no part of a block but reaches beyond it, two pages that differ after its end
    hold the same block: it came with the first of them and goes with the last.

    With windows and recurrent states a path counts up to the last border at which every group has
    what goes on from there. A prompt that leaves the path before that border is found shorter than
    this says: what a listener finds here is a hint where to send a request, not a promise.
    """

    def __init__(self) -> None:
        self._copies: Counter[bytes] = Counter()
        self._events: list[CacheEvent] = []

    def stored(self, parent: bytes, blocks: list[bytes]) -> None:
        """Blocks came that follow each other and `parent`."""
        known = sum(block in self._copies for block in blocks)  # the first ones, for all follow
        self._copies.update(blocks)
        chain = [parent, *blocks]
        for start in range(known, len(blocks), BLOCKS_MAX):
            self._events.append(
                StoredEvent(chain[start], tuple(chain[start + 1 : start + 1 + BLOCKS_MAX]))
            )

    def removed(self, blocks: list[bytes]) -> None:
        """Blocks went; those that follow them have gone before."""
        self._copies.subtract(blocks)
        gone = [block for block in blocks if not self._copies[block]]
        for block in gone:
            del self._copies[block]
        for start in range(0, len(gone), BLOCKS_MAX):
            self._events.append(RemovedEvent(tuple(gone[start : start + BLOCKS_MAX])))

    def cleared(self) -> None:
        """All blocks went."""
        self._copies.clear()
        self._events.append(ClearedEvent())

    def take(self) -> tuple[CacheEvent, ...]:
        """What happened since the last call."""
        if not self._events:
            return ()
        events, self._events = tuple(self._events), []
        return events


@dataclass(frozen=True, slots=True)
class EventReplay:
    """Events that bring a listener up to `seq`.

    Attributes:
        events: In order. Where too much was missed, a `ClearedEvent` and then all that is there.
        seq: Of the newest event that is included.
    """

    events: tuple[CacheEvent, ...]
    seq: int


class EventLog:
    """Numbers events from 1 and keeps the newest, and the blocks that are there now.

    Each block is announced once, as by `BlockTracker`. The log lives outside the batching
    loop, which a replay of a large cache must not delay.
    """

    def __init__(self, events_max: int = 10_000) -> None:
        self.seq = 0
        """Number of the newest event."""
        self._newest: deque[CacheEvent] = deque(maxlen=events_max)
        self._parents: dict[bytes, bytes] = {}  # of the blocks that are there, in order of coming

    def __len__(self) -> int:
        """Blocks that are there now."""
        return len(self._parents)

    def add(self, events: Iterable[CacheEvent]) -> None:
        """These happened next."""
        for event in events:
            self.seq += 1
            self._newest.append(event)
            match event:
                case StoredEvent(parent, blocks):
                    self._parents.update(zip(blocks, (parent, *blocks), strict=False))
                case RemovedEvent(blocks):
                    for block in blocks:
                        del self._parents[block]
                case ClearedEvent():
                    self._parents.clear()

    def reaches(self, after: int) -> bool:
        """Whether everything after event `after` is still known one by one."""
        return 0 <= self.seq - after <= len(self._newest)

    def replay(self, after: int) -> EventReplay:
        """What came after event `after`, or all that is there if that is too long ago.

        A number from the future is one of an earlier life of this worker: everything is said anew.
        """
        if not self.reaches(after):
            return self._everything()
        known = len(self._newest)
        return EventReplay(tuple(islice(self._newest, known - (self.seq - after), known)), self.seq)

    def _everything(self) -> EventReplay:
        chains: list[tuple[bytes, list[bytes]]] = []
        for block, parent in self._parents.items():
            if chains and chains[-1][1][-1] == parent and len(chains[-1][1]) < BLOCKS_MAX:
                chains[-1][1].append(block)
            else:
                chains.append((parent, [block]))
        stored = [StoredEvent(parent, tuple(blocks)) for parent, blocks in chains]
        return EventReplay((ClearedEvent(), *stored), self.seq)
