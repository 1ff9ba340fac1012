"""The page allocator of one cache group."""

from __future__ import annotations

from collections import deque


class PagePool:
    """Hands out the pages 0..total-1 of a group and takes them back, by reference counts.

    A released page is not free at once: a plan that was launched before may still read it. It
    becomes free when `finished` has named that plan's step.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        # A stack: the page that was free last is the warmest in the processor's cache.
        self._free = list(range(total - 1, -1, -1))
        self._holders = [0] * total
        self._fenced: deque[tuple[int, int]] = deque()  # (step that may still read it, page)
        self._step_launched = 0
        self._step_finished = 0

    @property
    def free_count(self) -> int:
        """Pages that `allocate` can give now."""
        return len(self._free)

    @property
    def used_count(self) -> int:
        """Pages that somebody holds; neither free nor behind the fence."""
        return self.total - len(self._free) - len(self._fenced)

    def holders(self, page: int) -> int:
        """How many hold a page; 0 for a free or fenced one."""
        return self._holders[page]

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages that nobody holds. The caller has looked at `free_count`."""
        assert count <= len(self._free), "more pages taken than are free"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: list[int]) -> None:
        """Hold pages that somebody else holds too."""
        for page in pages:
            assert self._holders[page] > 0, "a page that nobody holds was shared"
            self._holders[page] += 1

    def release(self, pages: list[int]) -> None:
        """Hold pages no more. The last holder puts them behind the fence."""
        for page in pages:
            assert self._holders[page] > 0, "a page was released twice"
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._fenced.append((self._step_launched, page))
        self._lift()

    def launched(self, step: int) -> None:
        """A plan is about to run; pages released from here on may be read by it."""
        self._step_launched = step

    def finished(self, step: int) -> None:
        """The plan of `step`, and all before it, read nothing any more."""
        self._step_finished = step
        self._lift()

    def _lift(self) -> None:
        while self._fenced and self._fenced[0][0] <= self._step_finished:
            self._free.append(self._fenced.popleft()[1])
