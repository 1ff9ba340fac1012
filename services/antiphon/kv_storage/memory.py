"""The first tier: pages in memory, least recently used out first, leased ones never."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container


@dataclass(frozen=True, slots=True)
class Page:
    """One page's bytes, and their SHA-256, verified when they came in."""

    digest: bytes
    data: bytes | bytearray
    checksum: bytes


class MemoryTier:
    """Pages up to a number of bytes."""

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
        """Return a page, which is the most recently used one now."""
        page = self._pages.get(digest)
        if page is not None:
            self._pages.move_to_end(digest)
        return page

    def touch(self, digest: bytes) -> None:
        """Make a page the most recently used one, if it is here."""
        if digest in self._pages:
            self._pages.move_to_end(digest)

    def put(self, page: Page, protected: Container[bytes] = ()) -> list[Page] | None:
        """Take a page in; return what had to leave, or None if there is no room for it.

        Nothing leaves for a page that would not fit even then, and none of `keep` does.
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
        """Keep a page, which must be here, until it is unpinned as often."""
        assert digest in self._pages, "pinned a page that is not here"
        self._pins[digest] += 1

    def unpin(self, digest: bytes) -> None:
        """Take one pin away."""
        assert self._pins[digest] > 0, "unpinned a page that is not pinned"
        self._pins[digest] -= 1
        if not self._pins[digest]:
            del self._pins[digest]

    @property
    def pinned(self) -> int:
        """Pages that may not leave."""
        return len(self._pins)

    def _remove(self, page: Page) -> None:
        del self._pages[page.digest]
        self.bytes_held -= len(page.data)
