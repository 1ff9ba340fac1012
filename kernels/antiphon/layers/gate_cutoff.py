"""Activation sparsity: of the outputs of a gate only the greatest remain.

Instead of sorting them, it is taken that they are normally distributed: what is below a quantile of
that distribution is zero, and the quantile is subtracted from the rest.

Source: "Gaussian top-k" of Gemma 3n, as transformers computes it.

Axes: T tokens, W width of the gate.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from antiphon.layers.context import ForwardContext


class GateCutoff:
    """Cuts off the gate's outputs below the quantile `sparsity`, in (0, 1), of each token."""

    def __init__(self, sparsity: float, width: int) -> None:
        self._deviations = NormalDist().inv_cdf(sparsity)
        self._width = width

    def __call__(self, ctx: ForwardContext, gate: Tensor) -> Tensor:
        """Cut off this rank's outputs (T, W / ranks); mean and variance are those of all ranks."""
        wide = gate.float()
        centered = wide - ctx.tp.all_reduce(wide.sum(dim=-1, keepdim=True)) / self._width
        squares = centered.square().sum(dim=-1, keepdim=True)
        deviation = (ctx.tp.all_reduce(squares) / self._width).sqrt()
        return (centered - self._deviations * deviation).relu().to(gate.dtype)
