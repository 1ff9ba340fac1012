"""Stored pages: a tier in memory, a tier on disk, and both as one store."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
from collections import Counter, OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence
    from concurrent.futures import Executor

log = logging.getLogger(__name__)


SUFFIX = ".page"
CHECKSUM_BYTES = 32


@dataclass(frozen=True, slots=True)
class Page:
    """One page's bytes, and their SHA-256, verified on receipt."""

    digest: bytes
    data: bytes | bytearray
    checksum: bytes


class MemoryTier:
    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._pages: OrderedDict[bytes, Page] = OrderedDict()
        self._pins: Counter[bytes] = Counter()
        self.bytes_held = 0

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._pages

    def get(self, digest: bytes) -> Page | None:
        self.touch(digest)
        return self._pages.get(digest)

    def touch(self, digest: bytes) -> None:
        if digest in self._pages:
            self._pages.move_to_end(digest)

    def put(self, page: Page, protected: Container[bytes] = ()) -> list[Page] | None:
        """Add a page; return the evicted pages, or None if it does not fit.

        Nothing is evicted for a page that would not fit even then; `protected` pages never are.
        """
        if page.digest in self._pages:
            self._pages.move_to_end(page.digest)
            return []
        evictable = (
            (digest, len(old.data))
            for digest, old in self._pages.items()
            if not self._pins[digest] and digest not in protected
        )
        leaving = _evicted(evictable, self._bytes_max - self.bytes_held, len(page.data))
        if leaving is None:
            return None
        evicted = [self._pages.pop(digest) for digest in leaving]
        self.bytes_held -= sum(len(old.data) for old in evicted)
        self._pages[page.digest] = page
        self.bytes_held += len(page.data)
        return evicted

    def pin(self, digest: bytes) -> None:
        """Protect a page, which must be here, from eviction until it is unpinned as often."""
        assert digest in self._pages, "pinned a page that is not here"
        self._pins[digest] += 1

    def unpin(self, digest: bytes) -> None:
        assert self._pins[digest] > 0, "unpinned a page that is not pinned"
        self._pins[digest] -= 1
        if not self._pins[digest]:
            del self._pins[digest]


class DiskTier:
    """Pages in a folder of its own: one file per page, named by its digest, with LRU eviction.

    A file is the SHA-256 of the content, then the content; a file that fails the check is dropped.
    All calls block and must come from one thread.

    Raises:
        OSError: The folder cannot be made or read.
    """

    def __init__(self, folder: Path, bytes_max: int) -> None:
        self._folder = folder
        self._bytes_max = bytes_max
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self.bytes_held = 0
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._find_pages()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._sizes

    def touch(self, digests: Iterable[bytes]) -> None:
        """Mark pages as most recently used, the last one most; survives a restart."""
        for digest in digests:
            if digest in self._sizes:
                self._sizes.move_to_end(digest)
                with contextlib.suppress(OSError):  # a missing file is detected when it is read
                    os.utime(self._path(digest))

    def put(self, page: Page, protected: Container[bytes] = ()) -> bool:
        """Write a page; False if it does not fit beside `protected`, or writing fails."""
        if page.digest in self._sizes:
            self._sizes.move_to_end(page.digest)
            return True
        size = len(page.data) + CHECKSUM_BYTES
        evictable = ((old, held) for old, held in self._sizes.items() if old not in protected)
        if (leaving := _evicted(evictable, self._bytes_max - self.bytes_held, size)) is None:
            return False
        for old in leaving:
            self._drop(old)
        partial = self._path(page.digest).with_suffix(".partial")
        try:
            with partial.open("wb") as file:
                file.write(page.checksum)
                file.write(page.data)
            partial.rename(self._path(page.digest))
        except OSError as error:
            partial.unlink(missing_ok=True)
            log.warning("page not written", extra={"reason": error.strerror})
            return False
        self._sizes[page.digest] = size
        self.bytes_held += size
        return True

    def get(self, digest: bytes) -> Page | None:
        """Read a page. One that cannot be read or fails the check is dropped: a miss."""
        if digest not in self._sizes:
            return None
        try:
            content = self._path(digest).read_bytes()
        except OSError as error:
            log.warning("page not read", extra={"reason": error.strerror})
            self._drop(digest)
            return None
        checksum, data = content[:CHECKSUM_BYTES], content[CHECKSUM_BYTES:]
        if hashlib.sha256(data).digest() != checksum:
            log.warning("page corrupt on disk", extra={"digest": digest.hex()})
            self._drop(digest)
            return None
        self._sizes.move_to_end(digest)
        return Page(digest, data, checksum)

    def _find_pages(self) -> None:
        """Index the files of an earlier incarnation, oldest first."""
        found: list[tuple[int, bytes, int]] = []
        for entry in os.scandir(self._folder):
            if entry.name.endswith(".partial"):
                Path(entry.path).unlink(missing_ok=True)
            elif (digest := _digest_of(entry.name)) is not None:
                status = entry.stat()
                found.append((status.st_mtime_ns, digest, status.st_size))
        for _, digest, size in sorted(found):
            self._sizes[digest] = size
            self.bytes_held += size
        while self.bytes_held > self._bytes_max:
            self._drop(next(iter(self._sizes)))

    def _drop(self, digest: bytes) -> None:
        self.bytes_held -= self._sizes.pop(digest)
        self._path(digest).unlink(missing_ok=True)

    def _path(self, digest: bytes) -> Path:
        return self._folder / (digest.hex() + SUFFIX)


def _digest_of(name: str) -> bytes | None:
    try:
        return bytes.fromhex(name.removesuffix(SUFFIX)) if name.endswith(SUFFIX) else None
    except ValueError:
        return None


@dataclass(frozen=True, eq=False)
class PageStore:
    """Both tiers as one store: evicted pages go to disk, pages that are read come back.

    The event loop uses the memory tier, and of the disk tier only its index; all other disk calls
    run in `thread`, a single one, which serializes them.
    """

    memory: MemoryTier
    disk: DiskTier | None
    thread: Executor

    def __contains__(self, digest: bytes) -> bool:
        return digest in self.memory or (self.disk is not None and digest in self.disk)

    def prefix_length(self, chain: Sequence[bytes]) -> int:
        """Length of the longest stored prefix of the chain."""
        return next((i for i, digest in enumerate(chain) if digest not in self), len(chain))

    async def put(self, page: Page, protected: Container[bytes] = ()) -> bool:
        """Store a page; False if it does not fit in any tier beside `protected`."""
        # A page that is evicted to disk is still stored.
        if (leaving := self.memory.put(page, protected if self.disk is None else ())) is None:
            return await self._to_disk([page], protected)
        await self._to_disk(leaving, protected)
        return True

    async def touch(self, chain: Sequence[bytes]) -> None:
        """Mark a chain as used so that its last pages are evicted before its first.

        Without the first page none is found; in the order of use, the first would be evicted first.
        """
        backwards = list(reversed(chain))
        for digest in backwards:
            self.memory.touch(digest)
        if self.disk is not None and backwards:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self.thread, self.disk.touch, backwards)

    async def load(self, digest: bytes) -> Page | None:
        """Load a page into memory and return it; None if it is lost or does not fit."""
        page = self.memory.get(digest)
        if page is not None or self.disk is None:
            return page
        page = await asyncio.get_running_loop().run_in_executor(self.thread, self.disk.get, digest)
        if page is None:
            return None
        if (leaving := self.memory.put(page)) is None:
            return None
        await self._to_disk(leaving)
        return self.memory.get(digest)

    async def _to_disk(self, pages: Sequence[Page], keep: Container[bytes] = ()) -> bool:
        if self.disk is None:
            return not pages
        loop = asyncio.get_running_loop()
        written = [await loop.run_in_executor(self.thread, self.disk.put, p, keep) for p in pages]
        return all(written)


def _evicted(held: Iterable[tuple[bytes, int]], free: int, size: int) -> list[bytes] | None:
    """The first of the held pages that make room for `size` bytes; None if all of them do not."""
    leaving: list[bytes] = []
    for digest, held_bytes in held:
        if free >= size:
            break
        leaving.append(digest)
        free += held_bytes
    return leaving if free >= size else None
