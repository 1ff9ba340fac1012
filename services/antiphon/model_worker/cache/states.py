"""The recurrent states of requests in one cache group, as arrays by slot."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from antiphon.model_worker.cache.groups import HOLE, STATES_RUNNING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from antiphon.model_worker.cache.pool import PagePool

    Ints = NDArray[np.int32]
    Longs = NDArray[np.int64]
    Flags = NDArray[np.bool_]


class StateChains:
    """The states of requests in the pool of one group: a chain by slot, the oldest state first.

    The first is the state after the committed tokens, the next ones are those that launched rows
    write, and the last is written by the next row. So a row can be run again, a dropped row leaves
    nothing behind, and the first state can be inserted into the prefix cache as it is: a checkpoint
    is a state with one more holder, and a request that matches it continues from it without a copy.

    Without overlap a request has two states: a row reads one and writes the other. A verify row
    writes one after each of its tokens, since any of them may be its last accepted one.

    To launch and to commit n rows is a few array operations. What happens seldom is done by slot.

    Axes: S slots, R rows of a step, W states.

    Attributes:
        pages: (W, S) the states; the first is a hole while no token is committed, since it reads as
            zeros.
        entries: (S,) length of each chain, that hole included.
        held: (S,) states of each chain, without it.
        used: (S,) states that launched rows write.
    """

    def __init__(self, pool: PagePool, slots: int = 1) -> None:
        self.pages = np.full((STATES_RUNNING + 1, slots), HOLE, np.int32)
        self.entries = np.ones(slots, np.int64)
        self.held = np.zeros(slots, np.int64)
        self.used = np.zeros(slots, np.int64)
        self._slots = np.arange(slots)
        self._pool = pool

    # The rows of a step: one in each of the slots `at`.

    def short(self, at: slice | Ints) -> Flags:
        """(R,) which of these have nowhere to write the state of their next row."""
        return self.entries[at] < self.used[at] + 2

    def add(self, at: Ints) -> None:
        """Allocate a state for each of these. The caller has checked that so many are free."""
        entries = self.entries[at]
        self._widen(int(entries.max(initial=0)) + 1)
        self.pages[entries, at] = self._pool.allocate(len(at))
        self.entries[at] += 1
        self.held[at] += 1

    def launch(self, at: slice | Ints, writes: Longs | None = None) -> Ints:
        """(R, 1 + W) the states that the next rows of these read, and then those that they write.

        writes (R,) how many each writes, None: one; -1 stands beyond those of a row
        """
        first, states = self.used[at].copy(), self.pages.reshape(-1)
        last = self.used[at] = first + (1 if writes is None else writes)
        room = np.count_nonzero(last < self.entries[at])
        assert room == len(first), "a row has nowhere to write its state"
        width, slots = 2 if writes is None else 1 + int(writes.max()), self.pages.shape[1]
        places, rows = first * slots + self._slots[at], np.empty((len(first), width), np.int32)
        for number in range(width):
            rows[:, number] = states.take(places + number * slots, mode="clip")
        if writes is not None:
            rows[np.arange(width) > writes[:, np.newaxis]] = HOLE
        return rows

    def accept(self, slot: int, writes: int, place: int) -> None:
        """Let the first launched row, which writes so many states, have written that one alone.

        place: 1 is the state after its first token
        """
        assert 0 < place <= writes, "no state of these tokens was written"
        first, *written = self.states(slot)
        state = written.pop(place - 1)
        rejected, others = written[: writes - 1], written[writes - 1 :]
        self.pages[: self.entries[slot], slot] = [first, state, *others, *rejected]
        self.used[slot] -= writes - 1

    def commit(self, at: slice | Ints) -> None:
        """Make the state that the first launched row of each of these wrote the first one.

        The one before is reused, unless it has another holder.
        """
        slots, entries, old = self._slots[at], self.entries[at].copy(), self.pages[0][at].copy()
        used = self.used[at] = self.used[at] - 1
        assert not np.count_nonzero(used < 0), "no state of these tokens was written"
        for state, following in pairwise(self.pages):
            state[at] = following[at]
        reused = self._pool.holder_counts[old] == 1
        if np.count_nonzero(reused) == len(slots):
            self.pages[entries - 1, slots] = old
        else:
            self.pages[entries[reused] - 1, slots[reused]] = old[reused]
            self.entries[slots[~reused]] -= 1
            shared = ~reused & (old != HOLE)
            self.held[slots[shared]] -= 1
            self._pool.release(old[shared].tolist())
        surplus = entries > used + STATES_RUNNING
        if np.count_nonzero(surplus):
            for slot in slots[surplus].tolist():
                self._trim(slot)

    def current(self, at: slice | Ints) -> Ints:
        """(R,) the state after the committed tokens of each of these."""
        return self.pages[0][at]

    # One chain.

    def start(self, slot: int, state: int = HOLE) -> None:
        """Begin a chain with this state, which it holds from here on."""
        self._set(slot, [state], used=0)

    def take(self, slot: int, other: StateChains) -> None:
        """Take over the only chain of another one."""
        self._set(slot, other.states(0), used=other.used.item(0))
        other.start(0)

    def states(self, slot: int) -> list[int]:
        return self.pages[: self.entries[slot], slot].tolist()

    def need(self, slot: int, writes: int = 1) -> int:
        """Number of states to allocate before a row can be launched that writes so many."""
        return max(0, 1 + self.used.item(slot) + writes - self.entries.item(slot))

    def allocate(self, slot: int, writes: int = 1) -> None:
        """Allocate the states that the next row writes. The caller has checked they are free."""
        added = self._pool.allocate(self.need(slot, writes))
        self._set(slot, self.states(slot) + added, used=self.used.item(slot))

    def recall(self, slot: int) -> None:
        """Drop the launched rows; the next one continues from the first state."""
        self.used[slot] = 0
        self._trim(slot)

    def replace(self, slot: int, state: int) -> None:
        """Replace the first state by one with the same content, and take a reference to it."""
        old = self.pages.item(0, slot)
        self.pages[0, slot] = state
        self._pool.share((state,))
        self._pool.release((old,))

    def release(self, slot: int) -> None:
        """Release all states; the chain is empty then."""
        self._pool.release([state for state in self.states(slot) if state != HOLE])
        self.start(slot)

    def _trim(self, slot: int) -> None:
        """Release the states that neither the launched rows nor the next one uses."""
        states, used = self.states(slot), self.used.item(slot)
        self._pool.release(states[STATES_RUNNING + used :])
        self._set(slot, states[: STATES_RUNNING + used], used=used)

    def _set(self, slot: int, states: Sequence[int], *, used: int) -> None:
        count = len(states)
        self._widen(count)
        self.pages[:count, slot] = states
        self.entries[slot], self.held[slot] = count, count - (states[0] == HOLE)
        self.used[slot] = used

    def _widen(self, width: int) -> None:
        """Make room for chains of so many states."""
        if (more := width - len(self.pages)) > 0:
            self.pages = np.pad(self.pages, [(0, more), (0, 0)], constant_values=HOLE)
