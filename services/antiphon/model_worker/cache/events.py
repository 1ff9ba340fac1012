"""KV cache events: which blocks of 64 tokens were stored and removed, in order."""

from __future__ import annotations

from collections import Counter, deque
from itertools import islice
from typing import TYPE_CHECKING

from antiphon.wire.digests import split_digests
from antiphon.wire.kv_events import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent

if TYPE_CHECKING:
    from collections.abc import Iterable

BLOCKS_MAX = 1024
"""Maximum blocks of an event: 64 Ki tokens, 32 KiB of digests. A longer prompt has several."""


class BlockTracker:
    """The blocks of a radix tree; each is announced when it is stored and when it is removed.

    Where a page extends beyond the end of a block, two pages that differ after that end hold the
    same block: it is stored with the first of them and removed with the last.

    With windows and recurrent states a path counts up to the last border at which every group holds
    the prefix. A prompt that leaves the path before that border may match a shorter prefix than
    announced: the events are a hint for routing requests, not a guarantee.
    """

    def __init__(self) -> None:
        self._copies: Counter[bytes] = Counter()
        self._events: list[KvEvent] = []

    def stored(self, parent: bytes, blocks: list[bytes]) -> None:
        known = sum(block in self._copies for block in blocks)  # the first ones, for all follow
        self._copies.update(blocks)
        chain = [parent, *blocks]
        for start in range(known, len(blocks), BLOCKS_MAX):
            digests = b"".join(chain[start + 1 : start + 1 + BLOCKS_MAX])
            self._events.append(BlocksStored(parent=chain[start], digests=digests))

    def removed(self, blocks: list[bytes]) -> None:
        """Remove blocks; those that follow them were removed before."""
        self._copies.subtract(blocks)
        gone = [block for block in blocks if not self._copies[block]]
        for block in gone:
            del self._copies[block]
        for start in range(0, len(gone), BLOCKS_MAX):
            self._events.append(BlocksRemoved(digests=b"".join(gone[start : start + BLOCKS_MAX])))

    def cleared(self) -> None:
        self._copies.clear()
        self._events.append(BlocksCleared())

    def take(self) -> tuple[KvEvent, ...]:
        if not self._events:
            return ()
        events, self._events = tuple(self._events), []
        return events


class EventLog:
    """Numbers events from 1, and keeps the newest ones and the present blocks.

    Each block is announced once, as by `BlockTracker`. The log lives outside the batching
    loop, which a replay of a large cache must not delay.
    """

    def __init__(self, events_max: int = 10_000) -> None:
        self.seq = 0
        """Number of the newest event."""
        self._newest: deque[KvEvent] = deque(maxlen=events_max)
        self._parents: dict[bytes, bytes] = {}  # of present blocks, oldest first

    def add(self, events: Iterable[KvEvent]) -> None:
        for event in events:
            self.seq += 1
            self._newest.append(event)
            match event:
                case BlocksStored():
                    blocks = list(split_digests(event.digests))
                    self._parents.update(zip(blocks, (event.parent, *blocks), strict=False))
                case BlocksRemoved():
                    for block in split_digests(event.digests):
                        del self._parents[block]
                case BlocksCleared():
                    self._parents.clear()

    def reaches(self, after: int) -> bool:
        return 0 <= self.seq - after <= len(self._newest)

    def replay(self, after: int) -> tuple[KvEvent, ...]:
        """The events after `after`, or a clear and all present blocks if that is too long ago.

        A number beyond the newest one is from a previous process of this worker.
        """
        if not self.reaches(after):
            return self._everything()
        known = len(self._newest)
        return tuple(islice(self._newest, known - (self.seq - after), known))

    def _everything(self) -> tuple[KvEvent, ...]:
        chains: list[tuple[bytes, list[bytes]]] = []
        for block, parent in self._parents.items():
            if chains and chains[-1][1][-1] == parent and len(chains[-1][1]) < BLOCKS_MAX:
                chains[-1][1].append(block)
            else:
                chains.append((parent, [block]))
        stored = (
            BlocksStored(parent=parent, digests=b"".join(blocks)) for parent, blocks in chains
        )
        return (BlocksCleared(), *stored)
