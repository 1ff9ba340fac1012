"""8-bit integers, with a scale for the tensor, for each output, or for each group of inputs.

Source: the `int-quantized` format of compressed-tensors; Dettmers et al. 2022, arXiv:2208.07339
(LLM.int8, which stores the absmax as the scale); torchao's Int8WeightOnlyConfig.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from antiphon.layers.quantization.storage import (
    SCALES,
    Axis,
    Int8Weight,
    WeightField,
    check_divisible,
)
from antiphon.layers.weights import FLOATS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from antiphon.layers.quantization.storage import LoadedWeight, WeightFields

ZERO = ".weight_zero_point"


@dataclass(frozen=True, slots=True)
class Int8Storage:
    """A weight (O, I) of int8, and its scales.

    Attributes:
        scale: Whether there is one scale for the tensor, each output, or each group of its inputs.
        group: Inputs of a group.
        zero_point: Whether a zero point is stored with each scale.
    """

    scale: Literal["tensor", "channel", "group"]
    group: int = 0
    zero_point: bool = False

    def fields(self, outputs: int, inputs: int) -> WeightFields:
        """The scales, the zero points, and the weight."""
        del outputs
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
        wide = steps.float().view(outputs, scales.shape[-1] if scales.dim() > 1 else 1, -1)
        if self.zero_point:
            wide -= stored[ZERO].float().view(scales.shape)[..., None]
        return wide.mul_(scales[..., None]).view(outputs, inputs)


@dataclass(frozen=True, slots=True)
class LlmInt8Storage:
    """A weight (O, I) of int8, and the absmax of each output, which is stored as 127."""

    def fields(self, outputs: int, inputs: int) -> WeightFields:
        """The absmax values, and the weight."""
        del outputs, inputs
        return (
            WeightField(".SCB", (Axis("outputs"),), FLOATS),
            WeightField(".weight", (Axis("outputs"), Axis("inputs")), (torch.int8,)),
        )

    def dequantize(self, stored: Mapping[str, Tensor], outputs: int, inputs: int) -> LoadedWeight:
        """The int8 weights, with a 127th of the absmax as their scales."""
        del outputs, inputs
        return Int8Weight(stored[".weight"], stored[".SCB"].float() / 127)


@dataclass(frozen=True, slots=True)
class TorchaoInt8Storage:
    """An unquantized weight that the torchao package quantizes at load time."""

    def fields(self, outputs: int, inputs: int) -> WeightFields:
        """The weight; an output is quantized as a whole, however the weight is sharded."""
        del outputs
        return (WeightField(".weight", (Axis("outputs"), Axis("inputs", together=inputs)), FLOATS),)

    def dequantize(self, stored: Mapping[str, Tensor], outputs: int, inputs: int) -> LoadedWeight:
        """The int8 weights as torchao quantizes them."""
        del inputs
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
