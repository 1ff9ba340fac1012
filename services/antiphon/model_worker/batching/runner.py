"""The interface of plan runners, as the batching loop needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.model_worker.batching.plan import StepOutcome, StepPlan


class PlanRunner(Protocol):
    """Computes plans, one at a time, in the loop's thread.

    It never reads beyond a row's `kv_len`, zeroes the pages of a row that it reports as not finite,
    and samples the same token for the same row whatever else is in the plan. The writes of a plan
    depend on the plan alone, so that a failed plan can be run again in parts.
    """

    def run(self, plan: StepPlan) -> StepOutcome:
        """Compute a plan and return its outcome.

        An exception is attributed to one request of the plan: the others are run again without it.
        """
        ...


@runtime_checkable
class OverlapRunner(PlanRunner, Protocol):
    """A runner that computes asynchronously to the calling thread.

    Plans are computed in the order in which they are launched, and a plan may hold tokens that the
    one before it has yet to sample (`future`).
    """

    def launch(self, plan: StepPlan) -> Callable[[], StepOutcome]:
        """Start computing a plan, and return at once.

        The returned function waits for the outcome, once, and raises what the plan raised.
        """
        ...
