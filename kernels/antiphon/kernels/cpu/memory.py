"""Memory that is read from end to end in every step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from antiphon.kernels.cpu import extension

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def huge_zeros(*size: int, dtype: torch.dtype) -> Tensor:
    """Zeros in huge pages, where the kernel has any.

    Small pages cost a batch of one a tenth of its time: each is looked up in a table that is itself
    read from memory. Tensors share pages, so memory returns when the last of a group is gone.
    """
    flat: Tensor = extension.load().zeros(math.prod(size) * dtype.itemsize)
    return flat.view(dtype).view(size)
