"""The pool of one cache group: its pages, and how many hold each of them."""

from __future__ import annotations

from array import array
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


_CACHED = 1
_WATCHED = 2  # cached, and reported by `take_loosened` once it is loose


class PagePool:
    """Allocates and frees the pages 0..total-1 of a group, by reference counts.

    A released page is not free at once: a plan that was launched before may still read it. It
    becomes free when `finished` has named that plan's step.

    A page that the prefix cache holds is *cached*; a cached page without another holder is *loose*:
    it can be evicted. Loose pages are counted whenever a reference count changes, so that reading
    the count costs nothing.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        # A stack: the page that was freed last is the warmest in the processor's cache.
        self._free = list(range(total - 1, -1, -1))
        self._fresh = total  # at its bottom, which were never allocated
        self._holders = array("i", bytes(4 * (total + 1)))  # the last: none of a hole, which is -1
        self.holder_counts = np.frombuffer(self._holders, np.int32)
        """(P,) `holders` of all pages, as a view; 0 at -1, which is a hole."""
        self._cached = bytearray(total)
        self.loose_count = 0
        self._loosened: list[int] = []
        self._loose_since = [0] * total  # last launched step when its last request released it
        self._fenced: deque[tuple[int, int]] = deque()  # (step that may still read it, page)
        self._step_launched = 0
        self._step_finished = 0

    @property
    def fresh_from(self) -> int:
        """The first of the pages that were never allocated, which all those after it are, too."""
        return self.total - self._fresh

    @property
    def free_count(self) -> int:
        """Pages that can be allocated now."""
        return len(self._free)

    @property
    def used_count(self) -> int:
        """Pages with a holder, the prefix cache included; neither free nor fenced."""
        return self.total - len(self._free) - len(self._fenced)

    def holders(self, page: int) -> int:
        """Reference count of a page, the prefix cache included; 0 for a free or fenced one."""
        return self._holders[page]

    def is_loose(self, page: int) -> bool:
        return self._holders[page] == 1 and self._cached[page] > 0

    def loose_end(self, pages: Sequence[int], limit: int) -> int:
        """Number of loose pages at the end of a run, up to `limit`."""
        holders, cached = self._holders, self._cached
        count = 0
        for page in islice(reversed(pages), limit):
            if holders[page] != 1 or not cached[page]:
                break
            count += 1
        return count

    def allocate(self, count: int) -> list[int]:
        """The caller has checked `free_count`."""
        assert count <= len(self._free), "more pages allocated than are free"
        pages = [self._free.pop() for _ in range(count)]
        self._fresh = min(self._fresh, len(self._free))
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        holders = self._holders
        for page in pages:
            count = holders[page]
            assert count > 0, "a page without a holder was shared"
            if count == 1 and self._cached[page]:
                self.loose_count -= 1
            holders[page] = count + 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop a reference to pages. Without another one they are fenced, then free."""
        holders = self._holders
        for page in pages:
            count = holders[page] - 1
            cached = self._cached[page]
            assert count >= (cached > 0), "a page was released twice"
            holders[page] = count
            if count == 0:
                self._fenced.append((self._step_launched, page))
            elif count == 1 and cached:
                self._loosen(page)
        self._lift()

    def cache(self, pages: Iterable[int]) -> None:
        """Add the prefix cache's reference to pages, which a request holds now."""
        for page in pages:
            assert self._holders[page] > 0, "a page without a holder was cached"
            assert not self._cached[page], "a page was cached twice"
            self._cached[page] = _CACHED
            self._holders[page] += 1

    def forget(self, pages: Iterable[int]) -> None:
        """Drop the prefix cache's reference to pages.

        The prefix cache never reads pages: a page is fenced only for plans that were launched
        before its last request released it, and most often these have finished long ago.
        """
        holders, loose_since = self._holders, self._loose_since
        for page in pages:
            assert self._cached[page], "a page was forgotten that was not cached"
            self._cached[page] = 0
            holders[page] -= 1
            if holders[page]:
                continue
            self.loose_count -= 1
            if loose_since[page] <= self._step_finished:
                self._free.append(page)
            else:
                self._fenced.append((loose_since[page], page))

    def watch(self, page: int) -> None:
        """Report a cached page by `take_loosened` once it is loose. It is not loose now."""
        assert self._cached[page], "a page was watched that was not cached"
        assert self._holders[page] > 1, "a loose page was watched"
        self._cached[page] = _WATCHED

    def take_loosened(self) -> list[int]:
        """Watched pages that became loose since the last call; they are not watched any more."""
        loosened, self._loosened = self._loosened, []
        return loosened

    def launched(self, step: int) -> None:
        """Note that a plan is about to run: it may read pages released from here on."""
        self._step_launched = step

    def finished(self, step: int) -> None:
        """Note that the plan of `step`, and all before it, have finished."""
        self._step_finished = step
        self._lift()

    def _loosen(self, page: int) -> None:
        self.loose_count += 1
        self._loose_since[page] = self._step_launched
        if self._cached[page] == _WATCHED:
            self._cached[page] = _CACHED
            self._loosened.append(page)

    def _lift(self) -> None:
        while self._fenced and self._fenced[0][0] <= self._step_finished:
            self._free.append(self._fenced.popleft()[1])
