"""Eight bits: integers and FP8 (e4m3), with a scale for the tensor, an output, a group or a block.

Source: Micikevicius et al. 2022, arXiv:2209.05433 (e4m3), in the checkpoints of DeepSeek-V3
(blocks), compressed-tensors and the fp8 quantizer of transformers (the names); the `int-quantized`
format of compressed-tensors; Dettmers et al. 2022, arXiv:2208.07339 (LLM.int8, which stores the
absmax as the scale); torchao's Int8WeightOnlyConfig.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from antiphon.kernels.cpu.linear import Grouping
from antiphon.layers.quantization.storage import (
    FLOATS,
    SCALES,
    Axis,
    Fp8Weight,
    GroupedWeight,
    Int8Weight,
    LoadedWeight,
    WeightField,
    WeightFields,
    check_divisible,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


ZERO = ".weight_zero_point"
E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0


@dataclass(frozen=True, slots=True)
class Int8Storage:
    """A weight (O, I) of int8, and its scales."""

    # Whether there is one scale for the tensor, each output, or each group of its inputs.
    scale: Literal["tensor", "channel", "group"]
    group: int = 0  # inputs of a group
    zero_point: bool = False  # whether a zero point is stored with each scale

    def fields(self, outputs: int, inputs: int) -> WeightFields:
        if self.scale == "group":
            check_divisible(inputs, self.group, "inputs")
        axes: tuple[Axis | int, ...] = (1,)
        if self.scale != "tensor":
            across = 1 if self.scale == "channel" else Axis("inputs", self.group)
            axes = (Axis("outputs"), across)
        fields = [WeightField(".weight_scale", axes, SCALES)]
        if self.zero_point:
            fields.append(WeightField(ZERO, axes, (torch.int8,)))
        fields.append(WeightField(".weight", (Axis("outputs"), Axis("inputs")), (torch.int8,)))
        return tuple(fields)

    def dequantize(self, stored: Mapping[str, Tensor], outputs: int, inputs: int) -> LoadedWeight:
        """Int8 weights unchanged, if zero points are zero and each output has one scale."""
        steps, scales = stored[".weight"], stored[".weight_scale"].float()
        if self.scale != "group" and not self.zero_point:
            return Int8Weight(steps, scales.flatten().expand(outputs))
        scales = scales.view(-1, scales.shape[-1] if scales.dim() > 1 else 1).expand(outputs, -1)
        grouping = Grouping(8, inputs // scales.shape[1], torch.float32, minimums=self.zero_point)
        zeros = stored[ZERO].float().expand(scales.shape) if self.zero_point else None
        return GroupedWeight(grouping, steps.view(torch.uint8), scales, zeros=zeros)

    def grouping(self, inputs: int) -> Grouping | None:
        if self.scale != "group" and not self.zero_point:
            return None
        group = self.group if self.scale == "group" else inputs
        return Grouping(8, group, torch.float32, minimums=self.zero_point)


@dataclass(frozen=True, slots=True)
class LlmInt8Storage:
    """A weight (O, I) of int8, and the absmax of each output, which is stored as 127."""

    def fields(self, outputs: int, inputs: int) -> WeightFields:
        return (
            WeightField(".SCB", (Axis("outputs"),), FLOATS),
            WeightField(".weight", (Axis("outputs"), Axis("inputs")), (torch.int8,)),
        )

    def dequantize(self, stored: Mapping[str, Tensor], outputs: int, inputs: int) -> LoadedWeight:
        return Int8Weight(stored[".weight"], stored[".SCB"].float() / 127)

    def grouping(self, inputs: int) -> Grouping | None:
        return None


@dataclass(frozen=True, slots=True)
class TorchaoInt8Storage:
    """An unquantized weight that the torchao package quantizes at load time."""

    def fields(self, outputs: int, inputs: int) -> WeightFields:
        return (WeightField(".weight", (Axis("outputs"), Axis("inputs", together=inputs)), FLOATS),)

    def dequantize(self, stored: Mapping[str, Tensor], outputs: int, inputs: int) -> LoadedWeight:
        # Imported only when needed: it takes seconds, and need not be installed.
        from torchao.quantization import (  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]
            Int8Tensor,
            Int8WeightOnlyConfig,
            quantize_,
        )

        weight = stored[".weight"]
        with torch.device("meta"):
            linear = torch.nn.Linear(weight.shape[1], outputs, bias=False, dtype=weight.dtype)
        linear.weight = torch.nn.Parameter(weight, requires_grad=False)
        quantize_(linear, Int8WeightOnlyConfig())
        rounded = linear.weight
        assert isinstance(rounded, Int8Tensor), "what this configuration makes"
        return Int8Weight(rounded.qdata, rounded.scale.flatten().float())

    def grouping(self, inputs: int) -> Grouping | None:
        return None


@dataclass(frozen=True, slots=True)
class Fp8Storage:
    """A weight (O, I) of e4m3, and its scales."""

    # Whether there is one scale for the tensor, each output, or each block.
    scale: Literal["tensor", "channel", "block"]
    # Outputs and inputs of a block; the last ones of a weight may be smaller.
    block: tuple[int, int] = (128, 128)

    def fields(self, outputs: int, inputs: int) -> WeightFields:
        axes: Mapping[str, tuple[Axis | int, ...]] = {
            "tensor": (1,),
            "channel": (Axis("outputs"), 1),
            "block": (Axis("outputs", self.block[0]), Axis("inputs", self.block[1])),
        }
        return (
            WeightField(".weight_scale", axes[self.scale], SCALES),
            WeightField(".weight", (Axis("outputs"), Axis("inputs")), (E4M3,)),
        )

    def dequantize(self, stored: Mapping[str, Tensor], outputs: int, inputs: int) -> Fp8Weight:
        scales = stored[".weight_scale"].float()
        if self.scale == "block":
            scales = scales.repeat_interleave(self.block[0], 0)[:outputs]
        else:
            scales = scales.view(-1, 1).expand(outputs, 1)
        return Fp8Weight(stored[".weight"], scales, self.group(inputs))

    def grouping(self, inputs: int) -> Grouping | None:
        return None

    def group(self, inputs: int) -> int:
        """Inputs that share a scale."""
        return self.block[1] if self.scale == "block" else inputs


@dataclass(frozen=True, slots=True)
class OnlineFp8Storage:
    """An unquantized weight, quantized to e4m3 at load time with a scale for each output."""

    def fields(self, outputs: int, inputs: int) -> WeightFields:
        return (WeightField(".weight", (Axis("outputs"), Axis("inputs", together=inputs)), FLOATS),)

    def dequantize(self, stored: Mapping[str, Tensor], outputs: int, inputs: int) -> Fp8Weight:
        return Fp8Weight(*rounded_to_fp8(stored[".weight"]), inputs)

    def grouping(self, inputs: int) -> Grouping | None:
        return None

    def group(self, inputs: int) -> int:
        """Inputs that share a scale."""
        return inputs


def rounded_to_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each output so that its absmax becomes the largest finite value.

    weight (O, I)  ->  e4m3 (O, I), scales (O, 1) float32
    """
    wide = weight.float()
    scales = wide.abs().amax(dim=1, keepdim=True) / E4M3_MAX
    scales = torch.where(scales > 0, scales, 1.0)
    return (wide / scales).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3), scales
