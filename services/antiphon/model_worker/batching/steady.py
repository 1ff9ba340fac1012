"""Decodes that go on as they did: most steps, planned and committed at once for many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, overload

import numpy as np

from antiphon.model_worker.batching.plan import Ints, StepOutcome, StepPlan
from antiphon.model_worker.batching.request import BatchRow, Request
from antiphon.model_worker.batching.state import WIRE_IDS, ChoiceKey, Progress

if TYPE_CHECKING:
    from antiphon.model_worker.batching.layout import Layout
    from antiphon.model_worker.batching.running_batch import RunningBatch as StepPlanner
    from antiphon.model_worker.batching.slots import Slots

STEPS_AHEAD = 64
"""Steps whose lengths are counted at once."""
STEPS_MIN = 2
"""Steps that must surely follow: what they have in common is not gathered for fewer."""


class Drawn(Sequence[Progress]):
    """What a steady step did to its choices: a token more for each. Cheap until it is read.

    Attributes:
        keys: Of the choices; the same object in all steps of the same rows.
        token_ids: One of each, as `LoadProgress.token_ids` has it.
    """

    __slots__ = ("_before", "keys", "token_ids")

    def __init__(
        self, keys: tuple[ChoiceKey, ...], before: Sequence[Progress], token_ids: Ints
    ) -> None:
        """`before` is what would be told of each without its token."""
        self.keys = keys
        self._before = before
        self.token_ids = token_ids.astype(WIRE_IDS, copy=False).tobytes()

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, index: int) -> Progress: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Progress]: ...
    def __getitem__(self, index: int | slice) -> Progress | Sequence[Progress]:
        return self._read()[index]

    def __iter__(self) -> Iterator[Progress]:
        return iter(self._read())

    def _read(self) -> tuple[Progress, ...]:
        size, ids = WIRE_IDS.itemsize, self.token_ids
        return tuple(
            Progress(
                key=before.key,
                token_ids=ids[start : start + size],
                cached_tokens=before.cached_tokens,
                weights=before.weights,
                retractions=before.retractions,
            )
            for before, start in zip(self._before, range(0, len(ids), size), strict=True)
        )


class SteadyRows(Sequence[BatchRow]):
    """The rows of one step after another in which all that run draw a token each, and no more.

    Such a step changes a token and a length a row. Between two steps the weights drive what is
    here out of the caches: to choose, lay out and commit each row anew took three times as long as
    to move some arrays on. What was drawn is written to the requests by `settle`, for whoever looks
    at them.

    As a sequence it is the rows of the step that `go_on` was asked for, launched as any other's: so
    a step that ends somebody, or fails, is treated like any other. No more steps follow then.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        layout: Layout,
        slots: Slots,
        planner: StepPlanner,
        weights: str,
        fail: Callable[[Request, Exception], None],
    ) -> None:
        self._requests = requests
        self._layout = layout
        self._slots = slots
        self._planner = planner
        self._fail = fail
        self._unwritten: list[tuple[Request, Exception]] = []
        self._end_ids = frozenset[int]().union(*(request.end_ids for request in requests))
        self._starts = list(range(len(requests) + 1))
        self._keys = tuple([request.key for request in requests])
        self._before = tuple([_told(request, weights) for request in requests])
        last = [request.ids.item(request.length - 1) for request in requests]
        self._tokens: Ints = np.array(last, np.int32)
        self._computed = [request.length - 1 for request in requests]
        # Counted from 1. After the last one nobody is at its longest yet.
        self._step = 0
        self._steps_max = min(request.tokens_max - request.length for request in requests) - 1
        self._lengths: Ints  # of the steps that `go_on` has counted
        self._short: dict[int, list[int]] = {}
        for row in range(len(requests)):
            self._expect_short(row)
        self._drawn: list[Ints] = []
        self._in_flight = False
        self._rows: list[BatchRow] = []

    @property
    def requests(self) -> Sequence[Request]:
        """Whose they are, in order."""
        return self._requests

    def __len__(self) -> int:
        return len(self._requests)

    @overload
    def __getitem__(self, index: int) -> BatchRow: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[BatchRow]: ...
    def __getitem__(self, index: int | slice) -> BatchRow | Sequence[BatchRow]:
        self.end()
        return self._rows[index]

    def go_on(self) -> bool:
        """Make ready for one step more; say whether it may be one of these. It is launched then."""
        if self._in_flight or self._step >= self._steps_max:
            return False
        step = self._step + 1
        short = self._short.pop(step, None)
        if short is not None and not self._extend(step, short):
            return False
        if self._step % STEPS_AHEAD == 0:
            self._lengths = self._next_lengths()
        self._step = step
        self._in_flight = True
        return True

    def plan(self, step: int) -> StepPlan:
        """The plan of the step: that of the one before, a token further."""
        layout, ahead = self._layout, (self._step - 1) % STEPS_AHEAD
        return StepPlan(
            step=step,
            follows=True,
            slot=layout.slot,
            query_start=layout.query_start,
            query_len=layout.query_len,
            kv_len=self._lengths[ahead + 1],
            tokens=self._tokens,
            positions=self._lengths[ahead : ahead + 1],
            logit_tokens=layout.logit_tokens,
            sampling=layout.sampling,
            page_tables=self._slots.page_tables(layout.slot),
        )

    def take(self, outcome: StepOutcome) -> Drawn | None:
        """Take in what the step drew. None if it ended somebody: nothing was done then."""
        token_ids = outcome.token_ids
        if self._rows or outcome.starts.tolist() != self._starts or any(outcome.status.tolist()):
            return None
        if self._end_ids and not self._end_ids.isdisjoint(token_ids.tolist()):
            return None
        self._in_flight = False
        self._tokens = token_ids
        self._drawn.append(token_ids)
        return Drawn(self._keys, self._before, token_ids)

    def settle(self) -> None:
        """Write to the requests what was drawn. A request that does not take it ends alone."""
        self._write()
        self._fail_unwritten()

    def end(self) -> None:
        """No step more: all is written to the requests, a step that is launched as any other's."""
        self._write()
        if self._in_flight and not self._rows:
            self._rows = [BatchRow.launched(request, request.length) for request in self._requests]
        self._fail_unwritten()  # not before: a request that has ended is not launched

    def _write(self) -> None:
        if not self._drawn:
            return
        steps = len(self._drawn)
        columns = np.stack(self._drawn, axis=1)  # (R, steps)
        self._drawn.clear()
        for request, token_ids in zip(self._requests, columns, strict=True):
            try:
                request.go_on(token_ids)
                self._slots.length[request.slot] = request.length
            except Exception as error:  # noqa: BLE001  # logged where the request is ended
                self._unwritten.append((request, error))
        self._planner.count_decode_steps(steps)

    def _fail_unwritten(self) -> None:
        unwritten, self._unwritten = self._unwritten, []
        for request, error in unwritten:
            self._fail(request, error)

    def _next_lengths(self) -> Ints:
        """Tokens that each row knows after this step and those to come, (S, R).

        They are its positions in the step after. Many at once: to add to a few takes as long.
        """
        steps = np.arange(self._step, self._step + STEPS_AHEAD + 1, dtype=np.int32)
        return np.array(self._computed, np.int32) + steps[:, np.newaxis]

    def _extend(self, step: int, rows: Sequence[int]) -> bool:
        """Give rows the pages that they lack from a step on, if nobody must give way for them."""
        wants = [(self._requests[row], self._computed[row] + step) for row in rows]
        if not self._planner.allocate_pages(wants):
            return False
        for row in rows:
            self._expect_short(row)
        return True

    def _expect_short(self, row: int) -> None:
        """Note in which step a row comes to the end of its pages."""
        step = self._requests[row].reserved - self._computed[row] + 1
        self._short.setdefault(step, []).append(row)


def decodes_on(request: Request) -> bool:
    """Whether a request surely runs for some steps more, unless it draws its end."""
    known = request.planned == request.length - 1 and not request.ahead
    return known and request.tokens_max - request.length > STEPS_MIN


def _told(request: Request, weights: str) -> Progress:
    """What is told of a request in each step, without the token."""
    return Progress(
        key=request.key,
        cached_tokens=request.cached_tokens,
        weights=weights,
        retractions=request.retractions,
    )
