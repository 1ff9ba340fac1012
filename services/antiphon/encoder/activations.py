"""Activations of vision towers, by their names in config.json."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from antiphon.kernels.activation import ActivationKind


class VisionActivation(StrEnum):
    """Activation of the feed-forward layers, by its name in config.json."""

    QUICK_GELU = "quick_gelu"
    GELU = "gelu"
    GELU_TANH = "gelu_pytorch_tanh"
    SILU = "silu"


ACTIVATIONS: dict[VisionActivation, ActivationKind] = {
    VisionActivation.QUICK_GELU: "quick_gelu",
    VisionActivation.GELU: "gelu",
    VisionActivation.GELU_TANH: "gelu_tanh",
    VisionActivation.SILU: "silu",
}
"""By the names of the kernels."""
