"""The memory tier: LRU eviction, except for leased pages."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container


@dataclass(frozen=True, slots=True)
class Page:
    """One page's bytes, and their SHA-256, verified on receipt."""

    digest: bytes
    data: bytes | bytearray
    checksum: bytes


class MemoryTier:
    """Pages in memory, up to a number of bytes."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._pages: OrderedDict[bytes, Page] = OrderedDict()
        self._pins: Counter[bytes] = Counter()
        self.bytes_held = 0

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._pages

    def __len__(self) -> int:
        return len(self._pages)

    def get(self, digest: bytes) -> Page | None:
        """Return a page and mark it as the most recently used one."""
        page = self._pages.get(digest)
        if page is not None:
            self._pages.move_to_end(digest)
        return page

    def touch(self, digest: bytes) -> None:
        """Mark a page as the most recently used one, if it is here."""
        if digest in self._pages:
            self._pages.move_to_end(digest)

    def put(self, page: Page, protected: Container[bytes] = ()) -> list[Page] | None:
        """Add a page; return the evicted pages, or None if it does not fit.

        Nothing is evicted for a page that would not fit even then; `protected` pages never are.
        """
        if page.digest in self._pages:
            self._pages.move_to_end(page.digest)
            return []
        leaving: list[Page] = []
        free = self._bytes_max - self.bytes_held
        for old in self._pages.values():
            if free >= len(page.data):
                break
            if not self._pins[old.digest] and old.digest not in protected:
                leaving.append(old)
                free += len(old.data)
        if free < len(page.data):
            return None
        for old in leaving:
            self._remove(old)
        self._pages[page.digest] = page
        self.bytes_held += len(page.data)
        return leaving

    def pin(self, digest: bytes) -> None:
        """Protect a page, which must be here, from eviction until it is unpinned as often."""
        assert digest in self._pages, "pinned a page that is not here"
        self._pins[digest] += 1

    def unpin(self, digest: bytes) -> None:
        """Remove one pin."""
        assert self._pins[digest] > 0, "unpinned a page that is not pinned"
        self._pins[digest] -= 1
        if not self._pins[digest]:
            del self._pins[digest]

    @property
    def pinned(self) -> int:
        """Number of pages that cannot be evicted."""
        return len(self._pins)

    def _remove(self, page: Page) -> None:
        del self._pages[page.digest]
        self.bytes_held -= len(page.data)
