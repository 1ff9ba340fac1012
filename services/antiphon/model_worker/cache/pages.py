"""The page allocator of one cache group."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_CACHED = 1
_WATCHED = 2  # cached, and somebody wants to hear when it is loose


class PagePool:
    """Hands out the pages 0..total-1 of a group and takes them back, by reference counts.

    A released page is not free at once: a plan that was launched before may still read it. It
    becomes free when `finished` has named that plan's step.

    A page that the prefix index holds is *cached*; one that nobody else holds is *loose*: the index
    can give it up. Loose pages are counted as holders come and go, so that knowing how many there
    are costs nothing.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        # A stack: the page that was free last is the warmest in the processor's cache.
        self._free = list(range(total - 1, -1, -1))
        self._holders = [0] * total
        self._cached = bytearray(total)
        self._loose = 0
        self._loosened: list[int] = []
        self._loose_since = [0] * total  # the step launched last when its last request let go
        self._fenced: deque[tuple[int, int]] = deque()  # (step that may still read it, page)
        self._step_launched = 0
        self._step_finished = 0

    @property
    def free_count(self) -> int:
        """Pages that `allocate` can give now."""
        return len(self._free)

    @property
    def used_count(self) -> int:
        """Pages that somebody holds, the index included; neither free nor behind the fence."""
        return self.total - len(self._free) - len(self._fenced)

    @property
    def loose_count(self) -> int:
        """Cached pages that nobody but the index holds."""
        return self._loose

    def holders(self, page: int) -> int:
        """How many hold a page, the index included; 0 for a free or fenced one."""
        return self._holders[page]

    def is_loose(self, page: int) -> bool:
        """Whether nobody but the index holds a page."""
        return self._holders[page] == 1 and self._cached[page] > 0

    def loose_end(self, pages: Sequence[int], limit: int) -> int:
        """How many pages at the end of a run are loose, looking at no more than `limit`."""
        holders, cached = self._holders, self._cached
        count = 0
        for page in islice(reversed(pages), limit):
            if holders[page] != 1 or not cached[page]:
                break
            count += 1
        return count

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages that nobody holds. The caller has looked at `free_count`."""
        assert count <= len(self._free), "more pages taken than are free"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Hold pages that somebody else holds too."""
        holders = self._holders
        for page in pages:
            count = holders[page]
            assert count > 0, "a page that nobody held was shared"
            if count == 1 and self._cached[page]:
                self._loose -= 1
            holders[page] = count + 1

    def release(self, pages: Iterable[int]) -> None:
        """Hold pages no more. The last holder puts them behind the fence."""
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
        """The index holds pages too, which a request gives it."""
        for page in pages:
            assert self._holders[page] > 0, "a page that nobody held was cached"
            assert not self._cached[page], "a page was cached twice"
            self._cached[page] = _CACHED
            self._holders[page] += 1

    def forget(self, pages: Iterable[int]) -> None:
        """The index holds pages no more.

        It never read them: only a plan from before the last request let go of a page keeps that
        page behind the fence, and most often that plan has finished long ago.
        """
        holders, loose_since = self._holders, self._loose_since
        for page in pages:
            assert self._cached[page], "a page was forgotten that was not cached"
            self._cached[page] = 0
            holders[page] -= 1
            if holders[page]:
                continue
            self._loose -= 1
            if loose_since[page] <= self._step_finished:
                self._free.append(page)
            else:
                self._fenced.append((loose_since[page], page))

    def watch(self, page: int) -> None:
        """Name a cached page in `take_loosened` once it is loose. It is not now."""
        assert self._cached[page], "a page was watched that was not cached"
        assert self._holders[page] > 1, "a loose page was watched"
        self._cached[page] = _WATCHED

    def take_loosened(self) -> list[int]:
        """Pages that were watched and have become loose since the last call, watched no more."""
        loosened, self._loosened = self._loosened, []
        return loosened

    def launched(self, step: int) -> None:
        """A plan is about to run; pages released from here on may be read by it."""
        self._step_launched = step

    def finished(self, step: int) -> None:
        """The plan of `step`, and all before it, read nothing any more."""
        self._step_finished = step
        self._lift()

    def _loosen(self, page: int) -> None:
        self._loose += 1
        self._loose_since[page] = self._step_launched
        if self._cached[page] == _WATCHED:
            self._cached[page] = _CACHED
            self._loosened.append(page)

    def _lift(self) -> None:
        while self._fenced and self._fenced[0][0] <= self._step_finished:
            self._free.append(self._fenced.popleft()[1])
