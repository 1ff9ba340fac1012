"""Bidirectional attention: all tokens of a row are in the same forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from antiphon.kernels.rotary import apply_rotary
from antiphon.model_worker.runner.errors import PlanRefused

if TYPE_CHECKING:
    from torch import Tensor

    from antiphon.kernels.ops import Ops
    from antiphon.kernels.rotary import StepCosSin
    from antiphon.layers.context import AttentionParams
    from antiphon.model_worker.batching.plan import StepPlan


@dataclass(frozen=True, slots=True)
class BidirectionalAttend:
    """An `AttentionBackend` without a KV cache."""

    ops: Ops
    lengths: list[int]
    rotations: StepCosSin

    @classmethod
    def of(cls, ops: Ops, plan: StepPlan, rotations: StepCosSin) -> BidirectionalAttend:
        """Make the backend for the rows of a plan.

        Raises:
            PlanRefused: A row is only a chunk of a text, and later tokens could not be attended to.
        """
        if (plan.query_len != plan.kv_len).any():
            raise PlanRefused(
                f"step {plan.step}: bidirectional attention needs the whole text in one pass"
            )
        return cls(ops, plan.query_len.tolist(), rotations)

    def __call__(self, layer: int, heads: Tensor, params: AttentionParams) -> Tensor:
        """Apply RoPE, and let each token attend to its row: (T, Q + 2 H, D) -> (T, Q, D)."""
        del layer  # all layers attend to the same tokens
        keys = heads.shape[1] - 2 * params.kv_heads
        values = keys + params.kv_heads
        cos, sin = self.rotations.of(params.rotary).by_token
        rotated = apply_rotary(heads[:, :values], cos, sin)
        q, k, v = rotated[:, :keys], rotated[:, keys:], heads[:, values:]
        return self.ops.bidirectional_attention(q, k, v, self.lengths, params.scale, params.window)
