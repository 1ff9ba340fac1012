"""Index of the 64-token blocks that each worker holds, for cache-aware placement."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from antiphon.wire.digests import DIGEST_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from antiphon.wire.base import Process


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
        self._blocks_max = blocks_max
        self._holders: dict[bytes, int] = {}
        self._bits: dict[Process, int] = {}
        self._workers: dict[int, Process] = {}
        self._blocks: dict[Process, OrderedDict[bytes, None]] = {}  # the least recently used first
        self._partial: dict[Process, int] = {}
        self._expected: OrderedDict[tuple[Process, bytes], float] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        """Number of indexed blocks, counted per worker."""
        return self._count

    def overlaps(self, digests: bytes) -> dict[Process, int]:
        """Count the leading blocks of a prompt on each worker; workers with none are left out."""
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

    def block_count(self, worker: Process) -> int:
        """Number of indexed blocks of a worker."""
        return len(self._blocks.get(worker, ()))

    @property
    def free(self) -> int:
        """Number of blocks that can be added without an eviction."""
        return self._blocks_max - self._count

    @property
    def partial(self) -> Mapping[Process, int]:
        """Workers that hold blocks which were evicted from the index, and about how many."""
        return self._partial

    def store(self, worker: Process, digests: bytes) -> None:
        """Add blocks that a worker holds."""
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
        """Drop expected blocks that were not reported in time."""
        while self._expected and (name := next(iter(self._expected))):
            if self._expected[name] > now:
                return
            del self._expected[name]
            if name[0] in self._partial:
                self._regain(name[0])
            else:
                self._drop(*name)

    def remove(self, worker: Process, digests: bytes) -> None:
        """Remove blocks that a worker no longer holds."""
        for digest in split_digests(digests):
            self._expected.pop((worker, digest), None)
            if not self._drop(worker, digest):
                self._regain(worker)

    def clear(self, worker: Process) -> None:
        """Remove all blocks of a worker: its cache was cleared, or the worker is gone."""
        self._partial.pop(worker, None)
        for digest in self._blocks.pop(worker, ()):
            self._expected.pop((worker, digest), None)
            self._unmark(worker, digest)
        bit = self._bits.pop(worker, 0)
        self._workers.pop(bit, None)

    def _put(self, worker: Process, digest: bytes) -> None:
        """Add a block as the most recently used one of its worker."""
        known = self._blocks.get(worker)
        if known is None:
            known = self._blocks[worker] = OrderedDict()
        if digest in known:
            known.move_to_end(digest)
            return
        if self._count >= self._blocks_max:
            self._evict()
        known[digest] = None
        self._holders[digest] = self._holders.get(digest, 0) | self._bit(worker)
        self._count += 1

    def _evict(self) -> None:
        worker = max(self._blocks, key=self._size)
        digest = next(iter(self._blocks[worker]))
        if self._expected.pop((worker, digest), None) is None:
            self._partial[worker] = self._partial.get(worker, 0) + 1
        self._drop(worker, digest)

    def _size(self, worker: Process) -> int:
        return len(self._blocks[worker])

    def _regain(self, worker: Process) -> None:
        """One of the evicted blocks has left its worker."""
        if self._partial.get(worker):
            self._partial[worker] -= 1

    def _drop(self, worker: Process, digest: bytes) -> bool:
        known = self._blocks.get(worker)
        if known is None or digest not in known:
            return False
        del known[digest]
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
        bit = self._bits.get(worker)
        if bit is None:
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


def split_digests(digests: bytes) -> Iterator[bytes]:
    """Split concatenated digests; an incomplete one at the end is ignored."""
    whole = len(digests) - len(digests) % DIGEST_BYTES
    return (digests[at : at + DIGEST_BYTES] for at in range(0, whole, DIGEST_BYTES))
