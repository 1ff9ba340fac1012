"""Normalisation of rows, and which of them are finite."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (its name in every torch program)
from torch import Tensor

from antiphon.kernels.cpu.extension import cpu
from antiphon.kernels.op import kernel
from antiphon.kernels.triton.backend import triton

NormKind = Literal["rms", "rms_wide", "layer"]
"""`rms` rounds to the model's dtype before multiplying by its weight; `rms_wide`, whose weight is
in float32, after that; `layer` subtracts the mean as well."""


class NormWeights(NamedTuple):
    """Weight and bias of a norm, (hidden,) both; only a layer norm may have a bias."""

    weight: Tensor
    bias: Tensor | None = None


def _scale_to_unit(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    mean_square = wide.square().mean(dim=-1, keepdim=True)  # (tokens, 1)
    return (wide * torch.rsqrt(mean_square + eps)).to(x.dtype) * weight


@kernel("norm.rmsnorm", cpu("rmsnorm"), triton("norm:rmsnorm"))
def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row to unit root-mean-square; `eps` is added inside the root.

    x (tokens, hidden); weight (hidden,), same dtype  ->  (tokens, hidden). The sum of squares is
    taken in float32, and the row is rounded to the dtype of x before the weight multiplies it, as
    checkpoints were trained.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467, equation 4.
    """
    return _scale_to_unit(x, weight, eps)


@kernel("norm.add_rmsnorm", cpu("add_rmsnorm"), triton("norm:add_rmsnorm"))
def add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add a block's output to the residual stream, and normalise the sum for the next block.

    x, residual (tokens, hidden); weight (hidden,), same dtype  ->  the normalised sum, and the sum
    itself, which is the residual from here on
    """
    total = x + residual
    return _scale_to_unit(total, weight, eps), total


@kernel("norm.rmsnorm_wide", cpu("rmsnorm_wide"), triton("norm:rmsnorm_wide"))
def rmsnorm_wide(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row to unit root-mean-square, rounding once, after the weight multiplied.

    x (..., size); weight (size,) float32  ->  as x, in its dtype
    """
    wide = x.float()
    mean_square = wide.square().mean(dim=-1, keepdim=True)
    return (wide * torch.rsqrt(mean_square + eps) * weight).to(x.dtype)


@kernel("norm.layernorm", cpu("layernorm"), triton("norm:layernorm"))
def layernorm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Scale each row to zero mean and unit variance.

    x (..., size); weight, bias (size,), dtype of x  ->  as x

    Source: Ba et al. 2016, arXiv:1607.06450.
    """
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


@kernel("norm.squares")
def squares(x: Tensor) -> Tensor:
    """The sum of squares of each row, for a norm whose rows are sharded over ranks.

    x (tokens, size)  ->  (tokens, 1) float32
    """
    return x.float().square().sum(dim=-1, keepdim=True)


def gated_rmsnorm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int, gate_first: bool
) -> Tensor:
    """Scale each group of a row to unit root-mean-square, and multiply by silu(gate).

    `groups` equal parts of a row are scaled separately; with `gate_first`, the gate multiplies the
    input of the norm, not its result.
    x, gate (tokens, width); weight (width,)  ->  (tokens, width), dtype of gate; intermediate
    values are float32
    """
    wide, opening = x.float(), F.silu(gate.float())
    if gate_first:
        wide = wide * opening
    parts = wide.view(len(wide), groups, -1)  # (tokens, groups, width / groups)
    scaled = parts * torch.rsqrt(parts.square().mean(dim=-1, keepdim=True) + eps)
    normed = scaled.flatten(1) * weight.float()
    return (normed if gate_first else normed * opening).to(gate.dtype)


@kernel("rows.finite", cpu("finite_rows"), triton("norm:finite_rows"), invariant=True)
def finite_rows(values: Tensor) -> Tensor | None:
    """Which rows contain only finite values. values (R, N)  ->  (R,) bool; None: all do.

    A device on which a host would have to wait for None returns flags that are all set.
    """
    # One sum is an order cheaper than checking each element, and nearly always finite.
    if math.isfinite(float(values.sum(dtype=torch.float32))):
        return None
    return torch.isfinite(values).all(dim=-1)
