"""The states of one request: a pass reads one and writes the next, and none is written over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.model_worker.cache.groups import HOLE

if TYPE_CHECKING:
    from antiphon.model_worker.cache.pages import PagePool


class StateChain:
    """Where the states of a request lie in the pool of one group, the oldest first.

    The first stands after the committed tokens, the next ones after the rows that are launched and
    whose outcome nobody knows, and the last is what the next row may write. So a row can be run
    again, a row that counted for nothing leaves nothing behind, and the first state can be given
    to the prefix index as it is: a checkpoint is a state that has one more holder, and whoever
    finds it goes on from there without a copy.

    A request that runs by itself has two places: it reads one and writes the other.

    Attributes:
        pages: The places; the first is a hole while no token is committed, for it reads zeros.
        ends: After how many tokens each state stands; one entry more than rows are launched.
    """

    def __init__(self, pool: PagePool, tokens: int = 0, page: int = HOLE) -> None:
        """Begin at a state that is held already, or with none at 0 tokens."""
        self._pool = pool
        self.pages = [page]
        self.ends = [tokens]

    @property
    def need(self) -> int:
        """Places that lack until a row can be launched."""
        return max(0, len(self.ends) + 1 - len(self.pages))

    def allocate(self) -> None:
        """Have the place that the next row writes. The caller has looked at what is free."""
        self.pages += self._pool.allocate(self.need)

    def launch(self, end: int) -> None:
        """A row is launched that computes up to token `end`."""
        assert not self.need, "a row has nowhere to write its state"
        self.ends.append(end)

    def pair(self, start: int) -> tuple[int, int]:
        """Which state a launched row from token `start` on reads, and which it writes."""
        index = self.ends.index(start)
        return self.pages[index], self.pages[index + 1]

    def commit(self, tokens: int) -> None:
        """The first launched row ended at `tokens`, as it was meant to. Its state is the first.

        The one before it is written anew later, unless somebody else holds it too.
        """
        assert self.ends[1] == tokens, "a state stands after other tokens than are committed"
        old = self.pages.pop(0)
        del self.ends[0]
        if old == HOLE:
            return
        if self._pool.holders(old) == 1:
            self.pages.append(old)
        else:
            self._pool.release((old,))

    def recall(self) -> None:
        """Rows that are launched count for nothing; the next one goes on from the first state."""
        del self.ends[1:]

    def replace(self, page: int) -> None:
        """Go on from a state with the same content, which is held from now on."""
        old, self.pages[0] = self.pages[0], page
        self._pool.share((page,))
        self._pool.release((old,))

    def release(self) -> None:
        """Give all of them back, and begin anew."""
        self._pool.release(page for page in self.pages if page != HOLE)
        self.pages = [HOLE]
        self.ends = [0]
