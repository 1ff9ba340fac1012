"""The recurrent states of a request: a step reads one and writes another, never in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.model_worker.cache.groups import HOLE

if TYPE_CHECKING:
    from antiphon.model_worker.cache.pages import PagePool


class StateChain:
    """The states of a request in the pool of one group, the oldest first.

    The first is the state after the committed tokens, the next ones are those after the launched
    rows, and the last is written by the next row. So a row can be run again, a dropped row leaves
    nothing behind, and the first state can be inserted into the prefix cache as it is: a checkpoint
    is a state with one more holder, and a request that matches it continues from it without a copy.

    Without overlap a request has two states: a row reads one and writes the other.

    Attributes:
        pages: The states; the first is a hole while no token is committed, since it reads as zeros.
        ends: The number of tokens of each state; one entry more than there are launched rows.
    """

    def __init__(self, pool: PagePool, tokens: int = 0, page: int = HOLE) -> None:
        """Start from a state that is held already, or with none at 0 tokens."""
        self._pool = pool
        self.pages = [page]
        self.ends = [tokens]

    @property
    def need(self) -> int:
        """Number of states to allocate before a row can be launched."""
        return max(0, len(self.ends) + 1 - len(self.pages))

    def allocate(self) -> None:
        """Allocate the state that the next row writes. The caller has checked that it is free."""
        self.pages += self._pool.allocate(self.need)

    def launch(self, end: int) -> None:
        """Note that a row up to token `end` was launched."""
        assert not self.need, "a row has nowhere to write its state"
        self.ends.append(end)

    def pair(self, start: int) -> tuple[int, int]:
        """The states that the launched row from token `start` on reads and writes."""
        index = self.ends.index(start)
        return self.pages[index], self.pages[index + 1]

    def commit(self, tokens: int) -> None:
        """Make the state of the first launched row, which ended at `tokens`, the first one.

        The state before it is reused, unless it has another holder.
        """
        assert self.ends[1] == tokens, "a state does not match the committed tokens"
        old = self.pages.pop(0)
        del self.ends[0]
        if old == HOLE:
            return
        if self._pool.holders(old) == 1:
            self.pages.append(old)
        else:
            self._pool.release((old,))

    def recall(self) -> None:
        """Drop the launched rows; the next one continues from the first state."""
        del self.ends[1:]

    def replace(self, page: int) -> None:
        """Replace the first state by one with the same content, and take a reference to it."""
        old, self.pages[0] = self.pages[0], page
        self._pool.share((page,))
        self._pool.release((old,))

    def release(self) -> None:
        """Release all states, and start with none at 0 tokens."""
        self._pool.release(page for page in self.pages if page != HOLE)
        self.pages = [HOLE]
        self.ends = [0]
