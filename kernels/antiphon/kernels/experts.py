"""The experts of a layer, with the weights of all of them in one tensor.

Axes: T tokens, K experts selected for a token, E experts, D hidden size, W width of an expert.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (its name in every torch program)

from antiphon.kernels.activation import clamped_swish_mul, gate
from antiphon.kernels.op import kernel
from antiphon.kernels.routing import combine, sort_by_expert
from antiphon.kernels.triton.backend import triton

if TYPE_CHECKING:
    from torch import Tensor

    from antiphon.kernels.activation import ActivationKind


class ExpertWeights(NamedTuple):
    """Weights of all experts, outputs before inputs; the outputs of the gate come first."""

    gate_up: Tensor  # (E, 2 W, D)
    down: Tensor  # (E, D, W)
    gate_up_bias: Tensor | None = None  # (E, 2 W)
    down_bias: Tensor | None = None  # (E, D)


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
        wide = _linear(rows[begin:end], weights.gate_up, weights.gate_up_bias, expert)
        if isinstance(activation, tuple):
            opened = clamped_swish_mul.reference(wide, *activation)
        else:
            opened = gate.reference(wide, activation)
        made.append(_linear(opened, weights.down, weights.down_bias, expert))
    return combine.reference(torch.cat(made), pair, shares)


def _linear(x: Tensor, weights: Tensor, biases: Tensor | None, expert: int) -> Tensor:
    return F.linear(x, weights[expert], None if biases is None else biases[expert])
