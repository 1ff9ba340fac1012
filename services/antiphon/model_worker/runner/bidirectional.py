"""Attention that looks both ways, as layers meet it: all tokens of a row are in the pass."""

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
    """An `AttentionBackend` that keeps nothing."""

    ops: Ops
    lengths: list[int]
    rotations: StepCosSin

    @classmethod
    def of(cls, ops: Ops, plan: StepPlan, rotations: StepCosSin) -> BidirectionalAttend:
        """For the rows of a plan.

        Raises:
            PlanRefused: A row is a piece of a text: what comes after it is not there to be seen.
        """
        if (plan.query_len != plan.kv_len).any():
            raise PlanRefused(
                f"step {plan.step}: attention that looks both ways takes a text in one piece"
            )
        return cls(ops, plan.query_len.tolist(), rotations)

    def __call__(self, layer: int, heads: Tensor, manner: AttentionParams) -> Tensor:
        """Rotate queries and keys, and let each token see its row: (T, Q + 2 H, D) -> (T, Q, D)."""
        del layer  # they all see the same
        keys = heads.shape[1] - 2 * manner.kv_heads
        values = keys + manner.kv_heads
        cos, sin = self.rotations.of(manner.rotary).by_token
        turned = apply_rotary(heads[:, :values], cos, sin)
        q, k, v = turned[:, :keys], turned[:, keys:], heads[:, values:]
        return self.ops.bidirectional_attention(q, k, v, self.lengths, manner.scale, manner.window)
