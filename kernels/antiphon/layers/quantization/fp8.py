"""FP8: e4m3 values, with a scale for the tensor, for each output, or for each block.

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
    """A weight (O, I) of e4m3, and its scales.

    Attributes:
        scale: Whether there is one scale for the tensor, each output, or each block.
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
        """Multiply values by their scales, in float32."""
        scales = stored[".weight_scale"].float()
        wide = stored[".weight"].float()
        if self.scale != "block":
            return wide.mul_(scales)
        for axis, size in enumerate((outputs, inputs)):
            scales = scales.repeat_interleave(self.block[axis], axis).narrow(axis, 0, size)
        return wide.mul_(scales)


@dataclass(frozen=True, slots=True)
class OnlineFp8Storage:
    """An unquantized weight, quantized to e4m3 at load time with a scale for each output."""

    def fields(self, outputs: int, inputs: int) -> WeightFields:
        """The weight; an output is quantized as a whole, however the weight is sharded."""
        del outputs
        return (WeightField(".weight", (Axis("outputs"), Axis("inputs", together=inputs)), FLOATS),)

    def dequantize(self, stored: Mapping[str, Tensor], outputs: int, inputs: int) -> Tensor:
        """The quantized weight, in float32."""
        del outputs, inputs
        rounded, scales = rounded_to_fp8(stored[".weight"])
        return rounded.float().mul_(scales)


def rounded_to_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each output so that its absmax becomes the largest finite value.

    weight (O, I)  ->  e4m3 (O, I), scales (O, 1) float32
    """
    wide = weight.float()
    scales = wide.abs().amax(dim=1, keepdim=True) / E4M3_MAX
    scales = torch.where(scales > 0, scales, 1.0)
    return (wide / scales).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3), scales
