"""What the batching loop asks of whoever computes its plans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from antiphon.model_worker.batching.plan import Outcome, Plan


class Runner(Protocol):
    """Computes plans, one at a time, in the loop's thread.

    It never reads beyond a row's `kv_len`, zeroes the pages of a row that it reports as not finite,
    and draws the same token for the same row whatever else is in the plan.
    """

    def run(self, plan: Plan) -> Outcome:
        """Compute a plan and return when its outcome is known.

        What it raises ends the requests of that plan, and no others.
        """
        ...
