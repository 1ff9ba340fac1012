"""What the batching loop asks of whoever computes its plans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.model_worker.batching.plan import StepOutcome, StepPlan


class PlanRunner(Protocol):
    """Computes plans, one at a time, in the loop's thread.

    It never reads beyond a row's `kv_len`, zeroes the pages of a row that it reports as not finite,
    and draws the same token for the same row whatever else is in the plan. What a plan writes
    depends on the plan alone, so that a plan which failed can be run again in parts.
    """

    def run(self, plan: StepPlan) -> StepOutcome:
        """Compute a plan and return when its outcome is known.

        What it raises is blamed on one request of that plan: the others are run again without it.
        """
        ...


@runtime_checkable
class OverlapRunner(PlanRunner, Protocol):
    """A runner whose device computes apart from the thread that asks it to.

    Plans are computed in the order in which they are launched, and a plan may hold tokens that the
    one before it has yet to draw (`future`).
    """

    def launch(self, plan: StepPlan) -> Callable[[], StepOutcome]:
        """Begin to compute a plan, and return at once.

        What it returns waits for the outcome, once, and raises what the plan raised.
        """
        ...
