"""A linear whose bits of a token do not depend on the tokens beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
