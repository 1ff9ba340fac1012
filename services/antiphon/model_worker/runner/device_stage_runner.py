"""A rank of an earlier pipeline stage on a device: launches its layers, and samples nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from antiphon.kernels.cpu.fused_decoder import FusedDecoderOutput
from antiphon.model_worker.runner.device_runner import DeviceRunner
from antiphon.model_worker.runner.stage_runner import not_here, passed_on

if TYPE_CHECKING:
    from antiphon.model_worker.batching.plan import StepPlan
    from antiphon.model_worker.runner.device_runner import LaunchedPlan
    from antiphon.model_worker.runner.input_batch import InputBatch


class DeviceStageRunner(DeviceRunner):
    """Launches the layers of its stage, while later stages compute theirs of the plan before.

    It receives which rows are not finite when rank 0 concludes a plan, before a later one has their
    pages. No plan starts from a token that is still to be sampled, and none is captured.
    """

    def _score_launched(self, plan: StepPlan, batch: InputBatch) -> FusedDecoderOutput:
        ids = self.ops.resolve_futures(self._upload(plan.tokens), self._last)
        _, (hidden, finite, _) = self._contexts.run_layers(plan, batch, ids)
        return FusedDecoderOutput(hidden, finite, hidden[:0], None, None)

    def _launch_sampling(self, launched: LaunchedPlan) -> None:
        assert launched.scored is not None, "it was launched"
        finite = launched.scored.finite
        assert finite is not None, "layers run one by one"
        with torch.inference_mode(), self._stream.launching():
            launched.download = self._stream.download([finite])

    def _conclude_launched(self, launched: LaunchedPlan) -> None:
        assert launched.batch is not None, "it was launched"
        assert launched.download is not None, "it was launched"
        assert self._exchange is not None, "an earlier stage samples nothing"
        launched.download.wait()
        failed = self._exchange.share(launched.plan.step, not_here).failed
        if failed is not None:
            with torch.inference_mode(), self._stream.reading():
                self._wipe(launched.batch, failed)
        launched.result, launched.scored = passed_on(launched.plan), None
