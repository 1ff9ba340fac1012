"""Activations of vision towers, by their names in config.json."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812  # the usual name

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class VisionActivation(StrEnum):
    """Activation of the feed-forward layers, by its name in config.json."""

    QUICK_GELU = "quick_gelu"
    GELU = "gelu"
    GELU_TANH = "gelu_pytorch_tanh"
    SILU = "silu"


def quick_gelu(x: Tensor) -> Tensor:
    """CLIP's approximation of GELU: x * sigmoid(1.702 x)."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[VisionActivation, Callable[[Tensor], Tensor]] = {
    VisionActivation.QUICK_GELU: quick_gelu,
    VisionActivation.GELU: F.gelu,
    VisionActivation.GELU_TANH: partial(F.gelu, approximate="tanh"),
    VisionActivation.SILU: F.silu,
}
