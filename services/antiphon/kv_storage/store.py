"""Memory and disk tier as one store: evicted pages go to disk, pages that are read come back."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Sequence
    from concurrent.futures import Executor

    from antiphon.kv_storage.disk import DiskTier
    from antiphon.kv_storage.memory import MemoryTier, Page


class PageStore:
    """Pages of one node.

    Args:
        memory: Used by the event loop only.
        disk: None if there is none; used by `thread` only, except for its index.
        thread: A single thread, so that disk calls are serialized.
    """

    def __init__(self, memory: MemoryTier, disk: DiskTier | None, thread: Executor) -> None:
        self._memory = memory
        self._disk = disk
        self._thread = thread

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._memory or (self._disk is not None and digest in self._disk)

    def prefix_length(self, chain: Sequence[bytes]) -> int:
        """Length of the longest stored prefix of the chain."""
        return next((i for i, digest in enumerate(chain) if digest not in self), len(chain))

    async def put(self, page: Page, protected: Container[bytes] = ()) -> bool:
        """Store a page; False if it does not fit in any tier beside `protected`."""
        # A page that is evicted to disk is still stored.
        leaving = self._memory.put(page, protected if self._disk is None else ())
        if leaving is None:
            return await self._to_disk([page], protected)
        await self._to_disk(leaving, protected)
        return True

    async def touch(self, chain: Sequence[bytes]) -> None:
        """Mark a chain as used so that its last pages are evicted before its first.

        Without the first page none is found; in the order of use, the first would be evicted first.
        """
        backwards = list(reversed(chain))
        for digest in backwards:
            self._memory.touch(digest)
        if self._disk is not None and backwards:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._thread, self._disk.touch, backwards)

    async def load(self, digest: bytes) -> Page | None:
        """Load a page into memory and return it; None if it is lost or does not fit."""
        page = self._memory.get(digest)
        if page is not None or self._disk is None:
            return page
        page = await asyncio.get_running_loop().run_in_executor(
            self._thread, self._disk.get, digest
        )
        if page is None:
            return None
        leaving = self._memory.put(page)
        if leaving is None:
            return None
        await self._to_disk(leaving)
        return self._memory.get(digest)

    async def _to_disk(self, pages: Sequence[Page], keep: Container[bytes] = ()) -> bool:
        """Write pages; returns False if one was not written."""
        if self._disk is None:
            return not pages
        loop = asyncio.get_running_loop()
        written = [await loop.run_in_executor(self._thread, self._disk.put, p, keep) for p in pages]
        return all(written)
