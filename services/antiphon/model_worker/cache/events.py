"""What a worker tells of its cache: which blocks of 64 tokens came and went, in order."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stored:
    """All pages of these blocks are in the cache now. They follow each other.

    Attributes:
        parent: Digest of the block before the first, or the root of the namespace.
        blocks: Their digests, each chained from the one before.
    """

    parent: bytes
    blocks: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    """A page of each of these blocks is gone."""

    blocks: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Cleared:
    """Every block is gone."""


Event = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class Replay:
    """Events that bring a listener up to `seq`.

    Attributes:
        events: In order. Where too much was missed, a `Cleared` and then all that is there.
        seq: Of the newest event that is included.
    """

    events: tuple[Event, ...]
    seq: int


class EventLog:
    """Numbers events from 1 and keeps the newest, and the blocks that are there now.

    Where a page is no part of a block but reaches beyond it, two pages that differ after its end
    hold the same block: it came with the first of them and goes with the last.

    Says how full attention goes: pages of a window group come and go without an event, so what a
    listener finds here is a hint where to send a request, not a promise.
    """

    def __init__(self, events_max: int = 10_000) -> None:
        self.seq = 0
        """Number of the newest event."""
        self._newest: deque[Event] = deque(maxlen=events_max)
        self._parents: dict[bytes, bytes] = {}  # of the blocks that are there, in order of coming
        self._copies: Counter[bytes] = Counter()

    def __len__(self) -> int:
        """Blocks that are there now."""
        return len(self._parents)

    def stored(self, parent: bytes, blocks: list[bytes]) -> None:
        """Blocks came that follow each other and `parent`."""
        chain = [parent, *blocks]
        known = sum(block in self._parents for block in blocks)  # the first ones, for all follow
        self._parents.update(zip(chain[known + 1 :], chain[known:], strict=False))
        self._copies.update(blocks)
        if known < len(blocks):
            self._add(Stored(chain[known], tuple(blocks[known:])))

    def removed(self, blocks: list[bytes]) -> None:
        """Blocks went; those that follow them have gone before."""
        self._copies.subtract(blocks)
        gone = [block for block in blocks if not self._copies[block]]
        for block in gone:
            del self._parents[block], self._copies[block]
        if gone:
            self._add(Removed(tuple(gone)))

    def cleared(self) -> None:
        """All blocks went."""
        self._add(Cleared())
        self._parents.clear()
        self._copies.clear()

    def replay(self, after: int) -> Replay:
        """What came after event `after`, or all that is there if that is too long ago.

        A number from the future is one of an earlier life of this worker: everything is said anew.
        """
        missed = self.seq - after
        if not 0 <= missed <= len(self._newest):
            return self._everything()
        events = tuple(self._newest)[len(self._newest) - missed :]
        return Replay(events, self.seq)

    def _add(self, event: Event) -> None:
        self.seq += 1
        self._newest.append(event)

    def _everything(self) -> Replay:
        chains: list[tuple[bytes, list[bytes]]] = []
        for block, parent in self._parents.items():
            if chains and chains[-1][1][-1] == parent:
                chains[-1][1].append(block)
            else:
                chains.append((parent, [block]))
        stored = [Stored(parent, tuple(blocks)) for parent, blocks in chains]
        return Replay((Cleared(), *stored), self.seq)
