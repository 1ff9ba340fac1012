"""A linear of int8 weights, whose activations are rounded to int8 as it is called.

Source: Dettmers et al. 2022, arXiv:2208.07339, section 2.1 (a scale for each token, and one for
each output).

Axes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from antiphon.kernels.op import kernel
from antiphon.kernels.triton.backend import triton

if TYPE_CHECKING:
    from torch import Tensor

    from antiphon.kernels.linear_grouped import GroupedMatrix

INT8_MAX = 127


@kernel("linear.int8", triton("linear_int8:linear_int8", int8=True))
def linear_int8(x: Tensor, weights: GroupedMatrix) -> Tensor:
    """Multiply rounded activations: x (T, I)  ->  (T, O) in its dtype, bias added.

    Weights are int8 in one group, without minimums. Sums of products are exact, and are multiplied
    by both scales in float32: a token has the same bits in any batch.
    """
    codes, scales = quantize(x)
    total = (codes.double() @ weights.codes.double().T).float()
    total *= scales[:, None] * weights.scales
    if weights.bias is not None:
        total += weights.bias.float()
    return total.to(x.dtype)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round activations so that the absmax of each token becomes 127.

    The scale of a token with a number that is not finite is infinite, and so is its output, or no
    number.

    x (T, I)  ->  int8 (T, I), scales (T,) float32
    """
    wide = x.float()
    scales = wide.abs().nan_to_num(nan=torch.inf, posinf=torch.inf).amax(dim=-1) / INT8_MAX
    scales = torch.where(scales > 0, scales, 1.0)
    codes = (wide / scales[:, None]).round().clamp(-INT8_MAX, INT8_MAX)
    return codes.nan_to_num(0.0).to(torch.int8), scales
