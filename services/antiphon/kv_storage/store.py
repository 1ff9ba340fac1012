"""Both tiers as one store: what leaves memory goes to disk, what is read comes back."""

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
        memory: Touched by the event loop only.
        disk: None where there is none; touched by `thread` only, but for its index.
        thread: One thread, so that the disk sees one call at a time.
    """

    def __init__(self, memory: MemoryTier, disk: DiskTier | None, thread: Executor) -> None:
        self._memory = memory
        self._disk = disk
        self._thread = thread

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._memory or (self._disk is not None and digest in self._disk)

    def prefix_length(self, chain: Sequence[bytes]) -> int:
        """Count the pages of the chain that are held, up to the first that is not."""
        return next((i for i, digest in enumerate(chain) if digest not in self), len(chain))

    async def put(self, page: Page, protected: Container[bytes] = ()) -> bool:
        """Keep a page; False if nothing has room for it beside `keep`."""
        # What leaves memory for a disk is still held.
        leaving = self._memory.put(page, protected if self._disk is None else ())
        if leaving is None:
            return await self._to_disk([page], protected)
        await self._to_disk(leaving, protected)
        return True

    async def touch(self, chain: Sequence[bytes]) -> None:
        """A chain was of use: its end is evicted before its beginning, without which none is found.

        Pages are used from the first on, so by that alone the beginning would go first.
        """
        backwards = list(reversed(chain))
        for digest in backwards:
            self._memory.touch(digest)
        if self._disk is not None and backwards:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._thread, self._disk.touch, backwards)

    async def load(self, digest: bytes) -> Page | None:
        """Return a page that is in memory then, or None: lost, or no room for it."""
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
        """Write pages; False if one was not written."""
        if self._disk is None:
            return not pages
        loop = asyncio.get_running_loop()
        written = [await loop.run_in_executor(self._thread, self._disk.put, p, keep) for p in pages]
        return all(written)
