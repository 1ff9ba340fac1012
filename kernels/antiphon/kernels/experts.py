"""The experts of a layer, or a rank's slice of them, with their weights in one tensor.

Axes: T tokens, K experts selected for a token, E experts with weights here, N pairs of a token and
one of these, D hidden size, W width of an expert, I inputs, O outputs.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (its name in every torch program)
from torch import Tensor

from antiphon.kernels.activation import clamped_swish_mul, gate
from antiphon.kernels.linear_fp8 import Fp8Matrix, linear_fp8
from antiphon.kernels.linear_grouped import GroupedMatrix, linear_grouped
from antiphon.kernels.op import kernel
from antiphon.kernels.routing import combine, sort_by_expert
from antiphon.kernels.triton.backend import triton

if TYPE_CHECKING:
    from antiphon.kernels.activation import ActivationKind


class PlainMatrix(NamedTuple):
    """Weights in a dtype of activations."""

    weights: Tensor  # (O, I)
    bias: Tensor | None = None  # (O,)


Matrix = PlainMatrix | Fp8Matrix | GroupedMatrix


class ExpertWeights(NamedTuple):
    """Weights of experts, outputs before inputs; the outputs of the gate come first.

    Tensors of a matrix have an axis E before their own.
    """

    gate_up: Matrix  # of 2 W outputs and D inputs
    down: Matrix  # of D outputs and W inputs

    @property
    def experts(self) -> int:
        return len(self.down[0])


class ExpertSlice(NamedTuple):
    """The experts of a layer whose weights a rank has: some that follow each other."""

    first: int  # the number of the first one
    total: int  # of the layer


def matrix_of(stacked: Matrix, expert: int) -> Matrix:
    """The matrix of one expert, in the same memory."""
    tensors = {
        name: part[expert] for name, part in stacked._asdict().items() if isinstance(part, Tensor)
    }
    return stacked._replace(**tensors)


@kernel("moe.experts", triton("experts:experts", fixed="experts_fixed"))
def experts(
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
    weights: ExpertWeights,
    activation: ActivationKind | tuple[float, float],
    *,
    own: ExpertSlice | None = None,
    weighted_inputs: bool = False,
) -> Tensor:
    """Sum what the chosen experts of each token make of it: down(activation(gate(x)) * up(x)).

    Each product is rounded to the dtype of x, the sum is weighted by the shares and taken in
    float32. `activation`, if two numbers, is the sharpness and the limit of a clamped swish. With
    `weighted_inputs`, shares multiply the inputs of an expert, not its outputs. `own` is the slice
    of the experts that weights are of: others add nothing to a sum. None: weights are of all.

    x (T, D); chosen (T, K) int64, each below E or the total of the slice; shares (T, K) float32
    ->  (T, D)
    """
    first = 0 if own is None else own.first
    pair, bounds = sort_by_expert(chosen, range(first, first + weights.experts))
    rows = x.index_select(0, pair // chosen.shape[1])  # (N, D)
    if weighted_inputs:
        rows = (rows * shares.flatten()[pair, None]).to(x.dtype)
        shares = torch.ones_like(shares)
    made: list[Tensor] = []
    for expert, (begin, end) in enumerate(pairwise(bounds)):
        wide = _multiplied(matrix_of(weights.gate_up, expert), rows[begin:end])
        if isinstance(activation, tuple):
            opened = clamped_swish_mul.reference(wide, *activation)
        else:
            opened = gate.reference(wide, activation)
        made.append(_multiplied(matrix_of(weights.down, expert), opened))
    return combine.reference(torch.cat(made), pair, shares)


def _multiplied(matrix: Matrix, x: Tensor) -> Tensor:
    if isinstance(matrix, Fp8Matrix):
        return linear_fp8.reference(x, matrix)
    if isinstance(matrix, GroupedMatrix):
        return linear_grouped.reference(x, matrix)
    return F.linear(x, *matrix)
