"""Stored pages: a tier in memory, and one on disk that holds all of them, as one store."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from antiphon.kv_storage.pages import Page, PageIndex

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Executor

    from antiphon.kv_storage.disk import DiskTier


class MemoryTier:
    """Pages in memory: whole chains from their beginning, or any pages of a store on disk."""

    def __init__(self, bytes_max: int, *, over_disk: bool = False) -> None:
        self.index = PageIndex(bytes_max)
        self._over_disk = over_disk
        self._pages: dict[bytes, Page] = {}
        self._pins: Counter[bytes] = Counter()

    def get(self, digest: bytes) -> Page | None:
        return self._pages.get(digest)

    def put(self, page: Page) -> bool:
        """Add a page; False if it does not fit. Nothing is evicted for a page that would not."""
        if page.digest in self._pages:
            return True
        index, size = self.index, len(page.data)
        parent = None if self._over_disk else page.parent
        leaving = index.leaving(
            size + index.bytes_held - index.bytes_max,
            lambda digest: self._pins[digest] > 0 or digest == parent,
        )
        if leaving is None:
            return False
        for digest in leaving:
            del self._pages[digest]
            index.remove(digest)
        self._pages[page.digest] = page
        index.add(page.digest, parent, size)
        return True

    def drop(self, digest: bytes) -> None:
        """Remove a page and all that follow it here, pinned or not."""
        for each in reversed(self.index.descendants(digest)):
            del self._pages[each]
            self.index.remove(each)

    def pin(self, digest: bytes) -> None:
        """Protect a page, which must be here, from eviction until it is unpinned as often."""
        assert digest in self._pages, "pinned a page that is not here"
        self._pins[digest] += 1

    def unpin(self, digest: bytes) -> None:
        assert self._pins[digest] > 0, "unpinned a page that is not pinned"
        self._pins[digest] -= 1
        if not self._pins[digest]:
            del self._pins[digest]


@dataclass(frozen=True, eq=False)
class PageStore:
    """Both tiers as one store. With a disk, that is the store, and memory keeps copies of it.

    So a process that is killed loses nothing that it has reported as stored, and a page has its
    predecessors in the tier that counts. The event loop uses the memory tier, and of the disk tier
    only its index; all other disk calls run in `thread`, a single one, which serializes them.
    """

    memory: MemoryTier
    disk: DiskTier | None
    thread: Executor

    def __contains__(self, digest: bytes) -> bool:
        return digest in (self.memory if self.disk is None else self.disk).index

    def prefix_length(self, chain: Sequence[bytes]) -> int:
        """Length of the longest stored prefix of the chain."""
        return next((i for i, digest in enumerate(chain) if digest not in self), len(chain))

    async def put(self, page: Page) -> bool:
        """Store a page; False if its predecessor is not here, or it does not fit beside it."""
        if self.disk is None:
            reachable = page.parent is None or page.parent in self
            return reachable and self.memory.put(page)
        loop = asyncio.get_running_loop()
        stored = await loop.run_in_executor(self.thread, self.disk.put, page)
        if stored:
            self.memory.put(page)
        return stored

    async def drop(self, page: Page) -> None:
        """Drop a corrupt page from memory, and from disk where its file is, too."""
        if self.memory.get(page.digest) is page:
            self.memory.drop(page.digest)
        if self.disk is not None:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self.thread, self.disk.get, page.digest)

    async def touch(self, chain: Sequence[bytes]) -> None:
        """Mark pages of a chain, in its order, as used."""
        self.memory.index.touch(chain)
        if self.disk is not None and chain:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self.thread, self.disk.touch, chain)

    async def load(self, digest: bytes) -> Page | None:
        """Load a page into memory and return it; None if it is lost or does not fit."""
        if digest not in self:
            return None
        page = self.memory.get(digest)
        if page is not None or self.disk is None:
            return page
        page = await asyncio.get_running_loop().run_in_executor(self.thread, self.disk.get, digest)
        return page if page is not None and self.memory.put(page) else None
