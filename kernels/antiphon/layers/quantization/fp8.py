"""8-bit floating point: e4m3 numbers, and scales for all, for each output, or for each block.

Source: Micikevicius et al. 2022, arXiv:2209.05433 (the format); the checkpoints of DeepSeek-V3
(blocks), compressed-tensors and the fp8 quantizer of transformers (the names).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from antiphon.layers.quantization.storage import SCALES, Axis, WeightField
from antiphon.layers.weights import FLOATS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from antiphon.layers.quantization.storage import WeightFields

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0


@dataclass(frozen=True, slots=True)
class Fp8Storage:
    """A weight (O, I) of e4m3, and what to multiply it with.

    Attributes:
        scale: Whether there is one scale, one an output, or one a block.
        block: Outputs and inputs of a block; the last ones of a weight may be smaller.
    """

    scale: Literal["tensor", "channel", "block"]
    block: tuple[int, int] = (128, 128)

    def fields(self, outputs: int, inputs: int) -> WeightFields:
        """The scales, and the weight."""
        del outputs, inputs
        axes: Mapping[str, tuple[Axis | int, ...]] = {
            "tensor": (1,),
            "channel": (Axis("outputs"), 1),
            "block": (Axis("outputs", self.block[0]), Axis("inputs", self.block[1])),
        }
        return (
            WeightField(".weight_scale", axes[self.scale], SCALES),
            WeightField(".weight", (Axis("outputs"), Axis("inputs")), (E4M3,)),
        )

    def dequantize(self, stored: Mapping[str, Tensor], outputs: int, inputs: int) -> Tensor:
        """Widen, and multiply with the scales, in float32."""
        scales = stored[".weight_scale"].float()
        wide = stored[".weight"].float()
        if self.scale != "block":
            return wide.mul_(scales)
        for axis, size in enumerate((outputs, inputs)):
            scales = scales.repeat_interleave(self.block[axis], axis).narrow(axis, 0, size)
        return wide.mul_(scales)


@dataclass(frozen=True, slots=True)
class OnlineFp8Storage:
    """A weight in plain numbers that is rounded to e4m3 as it is read, a scale an output."""

    def fields(self, outputs: int, inputs: int) -> WeightFields:
        """The weight, of which an output is rounded as a whole, whoever keeps it."""
        del outputs
        return (WeightField(".weight", (Axis("outputs"), Axis("inputs", together=inputs)), FLOATS),)

    def dequantize(self, stored: Mapping[str, Tensor], outputs: int, inputs: int) -> Tensor:
        """What the rounded weight says, in float32."""
        del outputs, inputs
        rounded, scales = rounded_to_fp8(stored[".weight"])
        return rounded.float().mul_(scales)


def rounded_to_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round each output so that its greatest weight is the greatest that there is.

    weight (O, I)  ->  e4m3 (O, I), scales (O, 1) float32
    """
    wide = weight.float()
    scales = wide.abs().amax(dim=1, keepdim=True) / E4M3_MAX
    scales = torch.where(scales > 0, scales, 1.0)
    return (wide / scales).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3), scales
