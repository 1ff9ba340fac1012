"""Memory that is read from end to end in every step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from antiphon.kernels.cpu import extension

if TYPE_CHECKING:
    from torch import Tensor


def huge_zeros(*size: int, dtype: torch.dtype) -> Tensor:
    """Zeros in huge pages, where the kernel has any.

    Small pages cost a batch of one a tenth of its time: each is looked up in a table that is itself
    read from memory. Tensors share pages, so memory returns when the last of a group is gone.
    """
    flat: Tensor = extension.load().zeros(math.prod(size) * dtype.itemsize)
    return flat.view(dtype).view(size)


def pool_zeros(*size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros for what a step reads here and there: in huge pages, where they can be had."""
    if device.type == "cpu" and extension.unavailable_reason() is None:
        return huge_zeros(*size, dtype=dtype)
    return torch.zeros(size, dtype=dtype, device=device)
