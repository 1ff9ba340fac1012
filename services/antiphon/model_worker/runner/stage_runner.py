"""A rank of a pipeline stage before the last one, whose ranks have the head and sample."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import torch

from antiphon.model_worker.batching.plan import Ints, Sampled, StepOutcome
from antiphon.model_worker.runner.model_runner import ModelRunner

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.model_worker.batching.plan import SamplingPart, StepPlan
    from antiphon.model_worker.cache.groups import CacheGroup
    from antiphon.model_worker.model.load import LoadedModel
    from antiphon.model_worker.runner.input_batch import InputBatch
    from antiphon.model_worker.runner.model_runner import SampleExchange

NO_TOKENS: Ints = np.zeros(0, np.int32)


class StageRunner(ModelRunner):
    """Runs the layers of its stage, and goes on to the next plan while later stages run theirs.

    What was sampled from a plan is recorded before the first plan that was announced after it: so
    every rank has wiped a failed row before its pages are used again. No plan starts from a token
    that is still to be sampled. Outcomes have no tokens: they are those of the last stage.
    """

    def __init__(
        self,
        model: LoadedModel,
        groups: tuple[CacheGroup, ...],
        exchange: SampleExchange,
        *,
        forced: dict[str, str] | None = None,
        fused: bool = True,
        deterministic: bool = False,
    ) -> None:
        super().__init__(model, groups, forced=forced, fused=fused, deterministic=deterministic)
        self._last_stage = exchange
        self._unsampled = deque["tuple[StepPlan, InputBatch]"]()

    def run(self, plan: StepPlan, part: Callable[[], SamplingPart] | None = None) -> StepOutcome:
        self.settle()
        return super().run(plan, part)

    def settle(self) -> None:
        while self._unsampled and self._last_stage.shared:
            sampled = self._last_stage.share(self._unsampled[0][0].step, not_here)
            self._record(*self._unsampled.popleft(), sampled)

    def _compute(
        self, plan: StepPlan, batch: InputBatch, wait: Callable[[], SamplingPart] | None
    ) -> StepOutcome:
        with torch.inference_mode():
            token_ids = self._upload(plan.tokens.astype(np.int64))
            _, states = self._contexts.run_layers(plan, batch, token_ids)
        if len(plan.logit_tokens):
            self._unsampled.append((plan, batch))
        else:
            failed = batch.failed_rows(states.finite, None)
            self._record(plan, batch, Sampled(NO_TOKENS, failed=failed))
        return passed_on(plan)

    def _record(self, plan: StepPlan, batch: InputBatch, sampled: Sampled) -> None:
        starts, token_ids, ended = self._accept(plan, batch, plan.tokens, sampled)
        self._slots.record(plan.slot, starts, token_ids, ended)
        if sampled.failed is not None:
            with torch.inference_mode():
                self._wipe(batch, sampled.failed)


def passed_on(plan: StepPlan) -> StepOutcome:
    """What an earlier stage knows of a plan."""
    rows = len(plan.slot)
    return StepOutcome(
        step=plan.step,
        starts=np.zeros(rows + 1, np.int32),
        token_ids=NO_TOKENS,
        status=np.zeros(rows, np.int32),
        computed=plan.query_len,
    )


def not_here() -> Sampled:
    raise AssertionError("an earlier stage has no logits")
