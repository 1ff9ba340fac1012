"""Linears whose bits of a token do not depend on the tokens beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 (its name in every torch program)

from antiphon.kernels.op import kernel
from antiphon.kernels.triton.backend import triton

if TYPE_CHECKING:
    from torch import Tensor


@kernel("linear.tiled", triton("linear_tiled:linear_tiled"))
def linear_tiled(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply: x (T, I), weight (O, I), bias (O,)  ->  (T, O), summed in float32.

    torch's product, which defines the result, is batch-invariant on no device.
    """
    return F.linear(x, weight, bias)


@kernel("linear.heads", triton("linear_tiled:linear_heads"))
def linear_heads(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply each head by a weight of its own: x (T, Q, I), weight (Q, O, I)  ->  (T, Q, O).

    As of `linear_tiled`, the sums are float32, and torch's product is batch-invariant on no device.
    """
    return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)
