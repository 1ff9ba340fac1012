"""Activations of vision towers, by their names in config.json."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812  # the usual name

from antiphon.encoder.preprocess import VisionActivation

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def quick_gelu(x: Tensor) -> Tensor:
    """CLIP's approximation of GELU: x * sigmoid(1.702 x)."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[VisionActivation, Callable[[Tensor], Tensor]] = {
    VisionActivation.QUICK_GELU: quick_gelu,
    VisionActivation.GELU: F.gelu,
    VisionActivation.GELU_TANH: partial(F.gelu, approximate="tanh"),
    VisionActivation.SILU: F.silu,
}
