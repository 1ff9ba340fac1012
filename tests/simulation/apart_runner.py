"""A runner whose plans are computed in another thread, tokens of the plan before included."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.model_worker.batching.plan import PlanRunner, StepOutcome, StepPlan


class Cursed(Exception):
    """What a kernel might raise."""


class CursedRunner:
    """Raises for every plan that computes a certain token, after the others are written."""

    def __init__(self, runner: PlanRunner, token: int) -> None:
        self.runner = runner
        self.token = token
        self.raised = 0

    def run(self, plan: StepPlan) -> StepOutcome:
        outcome = self.runner.run(plan)
        if self.token in plan.tokens:
            self.raised += 1
            raise Cursed(f"step {plan.step}")
        return outcome


class ApartRunner:
    """Computes in a thread of its own, in order.

    `resolves` futures from its own last results, for a runner that does not do so itself.

    Attributes:
        held_max: Most plans that were launched and not read at once.
        rows: Rows of all plans.
        tokens: Tokens of all plans.
        futures: Tokens that were not known when their plan was made.
    """

    def __init__(self, runner: PlanRunner, *, resolves: bool = True) -> None:
        self._runner = runner
        self._resolves = resolves
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._last: dict[int, int] = {}
        self._held = 0
        self.held_max = 0
        self.rows = 0
        self.tokens = 0
        self.futures = 0

    def close(self) -> None:
        self._thread.shutdown()

    def run(self, plan: StepPlan) -> StepOutcome:
        return self.launch(plan)()

    def launch(self, plan: StepPlan) -> Callable[[], StepOutcome]:
        self._held += 1
        self.held_max = max(self.held_max, self._held)
        self.rows += len(plan.slot)
        self.tokens += len(plan.tokens)
        computed = self._thread.submit(self._compute, plan)

        def outcome() -> StepOutcome:
            self._held -= 1
            return computed.result(timeout=10)

        return outcome

    def _compute(self, plan: StepPlan) -> StepOutcome:
        futures = np.flatnonzero(plan.tokens < 0).tolist()
        self.futures += len(futures)
        if not self._resolves:
            return self._runner.run(plan)
        tokens = plan.tokens.copy()
        for index in futures:
            # A slot whose step failed has drawn nothing: this plan will count for nothing.
            tokens[index] = self._last.get(-1 - int(tokens[index]), 0)
        outcome = self._runner.run(msgspec.structs.replace(plan, tokens=tokens))
        for row, slot in enumerate(plan.slot.tolist()):
            accepted = outcome.token_ids[outcome.starts[row] : outcome.starts[row + 1]]
            if len(accepted):
                self._last[slot] = int(accepted[-1])
        return outcome
