"""Laurel: a learned residual of low rank beside a mixer.

Source: Menghani et al. 2024, arXiv:2411.07501, and Gemma 3n as transformers computes it.

Axes: T tokens, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from antiphon.layers.linear import replicated
from antiphon.layers.per_layer_embedding import HALF
from antiphon.layers.weights import Module

if TYPE_CHECKING:
    from torch import Tensor

    from antiphon.layers.context import ForwardContext
    from antiphon.layers.norm import NormSpec
    from antiphon.layers.sublayer import LayerBuildContext


@dataclass(frozen=True, slots=True, kw_only=True)
class LaurelSpec:
    """Names of tensors are relative to the layer."""

    rank: int
    norm: NormSpec  # of what the two linears make
    left: str = "laurel.linear_left"
    right: str = "laurel.linear_right"
    norm_name: str = "laurel.post_laurel_norm"


class Laurel(Module):
    """x + norm(right(left(x))), of what the mixer reads."""

    def __init__(self, site: LayerBuildContext, spec: LaurelSpec) -> None:
        self._left = site.replicated(spec.left, spec.rank, bias=False)
        self._right = replicated(
            site.tensor_name(spec.right),
            spec.rank,
            site.hidden,
            bias=False,
            build=site.build,
            method=site.method,
        )
        self._norm = site.norm(spec.norm, spec.norm_name, site.hidden)
        self.children = (self._left, self._right, self._norm)

    def __call__(self, ctx: ForwardContext, x: Tensor, stream: Tensor) -> Tensor:
        """The stream (T, D) behind the mixer, which read x (T, D), joined with this residual."""
        learned = self._norm(ctx, self._right(ctx, self._left(ctx, x)))
        return (stream + x + learned) * HALF
