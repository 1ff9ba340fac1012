"""When decodes begin to go on as they did, and when they stop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.model_worker.batching.steady import Drawn, SteadyRows, decodes_on

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from antiphon.model_worker.batching.layout import Layout
    from antiphon.model_worker.batching.plan import StepOutcome
    from antiphon.model_worker.batching.request import BatchRow, Request
    from antiphon.model_worker.batching.running_batch import RunningBatch
    from antiphon.model_worker.batching.running_batch import RunningBatch as StepPlanner
    from antiphon.model_worker.batching.state import EngineLimits


class Stretch:
    """The steady rows of the steps to come, if there are any, and what the last of them drew."""

    def __init__(
        self,
        holdings: RunningBatch,
        planner: StepPlanner,
        fail: Callable[[Request, Exception], None],
    ) -> None:
        """`fail` ends a request to which the tokens that it drew could not be written."""
        self._holdings = holdings
        self._planner = planner
        self._fail = fail
        self._rows: SteadyRows | None = None
        self._drawn: Drawn | None = None
        self._layout: Layout | None = None

    def next_rows(self) -> Sequence[BatchRow]:
        """The rows of the last step once more, if all of them go on."""
        rows = self._rows
        return rows if rows is not None and rows.go_on() else ()

    def take(self, rows: SteadyRows, outcome: StepOutcome) -> bool:
        """Take in what a step of these drew. False if it ended somebody: commit them as others."""
        self._drawn = rows.take(outcome)
        if self._drawn is None:
            self._rows = None
        return self._drawn is not None

    def take_drawn(self) -> Drawn | None:
        """What the last step drew; it is told once."""
        drawn, self._drawn = self._drawn, None
        return drawn

    def settle(self) -> None:
        """Write to the requests what was drawn."""
        if self._rows is not None:
            self._rows.settle()

    def end(self) -> None:
        """Somebody looks at requests, or changes who runs: there are no steady rows any more."""
        rows, self._rows = self._rows, None
        if rows is not None:
            rows.end()

    def forget(self) -> None:
        """There are no steady rows any more, and what they drew is not written: requests end."""
        self._rows = None

    def begin(self, rows: Sequence[BatchRow], outcome: StepOutcome, limits: EngineLimits) -> None:
        """Steady rows follow these, if these were all, as those before, and go on.

        Nothing is in flight. None follow the first such step: where somebody comes or ends in each,
        it would be in vain.
        """
        holdings, before = self._holdings, self._layout
        pools, slots = holdings.pools, holdings.slots
        self._layout = layout = slots.last_layout
        if layout is None or layout is not before or not layout.decodes:
            return
        if len(rows) != len(holdings.running) or pools.sparse or limits.stream_interval > 1:
            return
        if len(outcome.token_ids) != len(rows) or not (
            slots.logits_processors.idle and slots.logprobs.idle
        ):
            return
        requests = [row.request for row in rows]
        if all(map(decodes_on, requests)):
            self._rows = SteadyRows(
                requests, layout, slots, self._planner, limits.weight_version, self._fail
            )
