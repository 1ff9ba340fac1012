"""Memory of page pools that is touched before a step writes it.

The system makes memory when it is first written. In a virtual machine whose host has yet to find
it, that takes milliseconds for the 2 MiB of a huge page, and where a prompt begins new ones it
begins one in every layer: a step was found to take twice its time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from antiphon.model_worker.cache.pool import PagePool
    from antiphon.model_worker.runner.pools import GroupMemory

AHEAD_BYTES: Final = 128 * 1024**2
"""Bytes of a pool that are touched before it is used, and at least so many beyond that."""
AHEAD_TIMES: Final = 4
"""How far a pool is touched, as a multiple of how far it has been used: a load that leaves no idle
moment grows on what was touched before it."""
PIECE_BYTES: Final = 2 * 1024**2
"""Bytes that are touched at a time, a huge page: mail that arrives meanwhile waits for no more."""


class Prefault:
    """Touches the pages that no request has had yet, by how far their pool has been used.

    It writes zeros to them, which they are: the caller is the thread that allocates pages. A pool
    that is used little stays small.
    """

    def __init__(self, pools: Iterable[tuple[PagePool, GroupMemory]]) -> None:
        self._pools = [_TouchedPool(pages, memory) for pages, memory in pools]

    def touch(self) -> bool:
        """Touch one more piece of a pool  ->  whether there was one to touch."""
        return any(pool.touch() for pool in self._pools)


class _TouchedPool:
    """The pages of one pool, which are touched in their order: so they are allocated."""

    def __init__(self, pages: PagePool, memory: GroupMemory) -> None:
        self._pages = pages
        # A layer of a tensor is contiguous, (P, bytes of a page in it).
        self._layers = [layer.numpy() for tensor in memory.tensors for layer in tensor]
        page_bytes = max([layer.shape[1] for layer in self._layers], default=0)
        self._run = max(1, PIECE_BYTES // max(1, page_bytes))
        self._ahead = AHEAD_BYTES // max(1, sum([layer.shape[1] for layer in self._layers]))
        self._pieces: list[tuple[int, int, int]] = []  # a layer, and pages of it; the last is next
        self._touched = 0

    def touch(self) -> bool:
        fresh = self._pages.fresh_from
        if not self._pieces or self._pieces[-1][1] < fresh:
            first = max(self._touched, fresh)
            wanted = min(self._pages.total, max(AHEAD_TIMES * fresh, fresh + self._ahead))
            end = min(wanted, first + self._run)
            self._pieces = [(layer, first, end) for layer in range(len(self._layers))]
            if first >= end or not self._pieces:
                self._pieces = []
                return False
        layer, first, end = self._pieces.pop()
        self._layers[layer][first:end] = 0
        if not self._pieces:
            self._touched = end
        return True
