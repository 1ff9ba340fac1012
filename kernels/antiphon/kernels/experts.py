"""The experts of a layer, with the weights of all of them in one tensor.

Axes: T tokens, K experts selected for a token, E experts, D hidden size, W width of an expert,
G groups of inputs that share a scale.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (its name in every torch program)

from antiphon.kernels.activation import clamped_swish_mul, gate
from antiphon.kernels.linear_fp8 import Fp8Matrix, linear_fp8
from antiphon.kernels.op import kernel
from antiphon.kernels.routing import combine, sort_by_expert
from antiphon.kernels.triton.backend import triton

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from antiphon.kernels.activation import ActivationKind


class MatrixScales(NamedTuple):
    """Scales of weights in e4m3, of each expert as in `antiphon.kernels.linear_fp8.Fp8Matrix`."""

    scales: Tensor  # (E, G, outputs) float32
    group: int  # inputs of a group; the last group may have fewer


class ExpertScales(NamedTuple):
    """Scales of both matrices of all experts."""

    gate_up: MatrixScales
    down: MatrixScales


class ExpertWeights(NamedTuple):
    """Weights of all experts, outputs before inputs; the outputs of the gate come first.

    With `scales`, weights are in e4m3, and activations are rounded before each product.
    """

    gate_up: Tensor  # (E, 2 W, D)
    down: Tensor  # (E, D, W)
    gate_up_bias: Tensor | None = None  # (E, 2 W)
    down_bias: Tensor | None = None  # (E, D)
    scales: ExpertScales | None = None

    def linears(self, expert: int) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        """The products of an expert: with its gate and up projections, and with its down."""
        gate_up, down = (None, None) if self.scales is None else self.scales
        return (
            partial(_linear, self.gate_up[expert], self.gate_up_bias, gate_up, expert),
            partial(_linear, self.down[expert], self.down_bias, down, expert),
        )


@kernel("moe.experts", triton("experts:experts", fixed="experts_fixed"))
def experts(
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
    weights: ExpertWeights,
    activation: ActivationKind | tuple[float, float],
    *,
    weighted_inputs: bool = False,
) -> Tensor:
    """Sum what the chosen experts of each token make of it: down(activation(gate(x)) * up(x)).

    Each product is rounded to the dtype of x, the sum is weighted by the shares and taken in
    float32. `activation`, if two numbers, is the sharpness and the limit of a clamped swish. With
    `weighted_inputs`, shares multiply the inputs of an expert, not its outputs.

    x (T, D); chosen (T, K) int64, each below E; shares (T, K) float32  ->  (T, D)
    """
    count = len(weights.down)
    pair, bounds = sort_by_expert(chosen, count)
    rows = x.index_select(0, pair // chosen.shape[1])  # (T * K, D)
    if weighted_inputs:
        rows = (rows * shares.flatten()[pair, None]).to(x.dtype)
        shares = torch.ones_like(shares)
    made: list[Tensor] = []
    for expert, (begin, end) in enumerate(pairwise(bounds)):
        gate_up, down = weights.linears(expert)
        wide = gate_up(rows[begin:end])
        if isinstance(activation, tuple):
            opened = clamped_swish_mul.reference(wide, *activation)
        else:
            opened = gate.reference(wide, activation)
        made.append(down(opened))
    return combine.reference(torch.cat(made), pair, shares)


def _linear(
    weight: Tensor, biases: Tensor | None, scales: MatrixScales | None, expert: int, x: Tensor
) -> Tensor:
    bias = None if biases is None else biases[expert]
    if scales is None:
        return F.linear(x, weight, bias)
    return linear_fp8.reference(x, Fp8Matrix(weight, scales.scales[expert], scales.group, bias))
