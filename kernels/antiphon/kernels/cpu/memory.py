"""Memory that every step reads from end to end."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from antiphon.kernels.cpu import extension

if TYPE_CHECKING:
    from torch import Tensor


def huge_zeros(*size: int, dtype: torch.dtype) -> Tensor:
    """Zeros in huge pages, where the kernel has any.

    Small pages cost a batch of one a tenth of its time: each needs a lookup in a page table that is
    itself in memory. Tensors share huge pages: memory is freed when the last of a group is gone.
    """
    flat: Tensor = extension.load().zeros(math.prod(size) * dtype.itemsize)
    return flat.view(dtype).view(size)


def pool_zeros(*size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros for memory with scattered reads: in huge pages, where possible."""
    if device.type == "cpu" and extension.unavailable_reason() is None:
        return huge_zeros(*size, dtype=dtype)
    return torch.zeros(size, dtype=dtype, device=device)
