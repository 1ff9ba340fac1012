"""8-bit whole numbers: steps of a scale for all, for each output, or for each group of inputs.

Source: the `int-quantized` format of compressed-tensors; Dettmers et al. 2022, arXiv:2208.07339
(LLM.int8, whose scales are the greatest weights themselves); torchao's Int8WeightOnlyConfig.
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
        scale: Whether there is one scale, one an output, or one a group of an output's inputs.
        group: Inputs of a group.
        zero_point: Whether what stands for zero is stored beside each scale.
    """

    scale: Literal["tensor", "channel", "group"]
    group: int = 0
    zero_point: bool = False

    def fields(self, outputs: int, inputs: int) -> WeightFields:
        """The scales, what stands for zero, and the weight."""
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
        """Steps as they are, if zero is zero and an output has one scale."""
        steps, scales = stored[".weight"], stored[".weight_scale"].float()
        if self.scale != "group" and not self.zero_point:
            return Int8Weight(steps, scales.flatten().expand(outputs))
        wide = steps.float().view(outputs, scales.shape[-1] if scales.dim() > 1 else 1, -1)
        if self.zero_point:
            wide -= stored[ZERO].float().view(scales.shape)[..., None]
        return wide.mul_(scales[..., None]).view(outputs, inputs)


@dataclass(frozen=True, slots=True)
class LlmInt8Storage:
    """A weight (O, I) of int8, and the greatest magnitude of each output, which 127 stands for."""

    def fields(self, outputs: int, inputs: int) -> WeightFields:
        """The magnitudes, and the weight."""
        del outputs, inputs
        return (
            WeightField(".SCB", (Axis("outputs"),), FLOATS),
            WeightField(".weight", (Axis("outputs"), Axis("inputs")), (torch.int8,)),
        )

    def dequantize(self, stored: Mapping[str, Tensor], outputs: int, inputs: int) -> LoadedWeight:
        """Steps of a 127th of the magnitudes."""
        del outputs, inputs
        return Int8Weight(stored[".weight"], stored[".SCB"].float() / 127)


@dataclass(frozen=True, slots=True)
class TorchaoInt8Storage:
    """A weight in the model's own numbers that the torchao package rounds as it is read."""

    def fields(self, outputs: int, inputs: int) -> WeightFields:
        """The weight, of which an output is rounded as a whole, whoever keeps it."""
        del outputs
        return (WeightField(".weight", (Axis("outputs"), Axis("inputs", together=inputs)), FLOATS),)

    def dequantize(self, stored: Mapping[str, Tensor], outputs: int, inputs: int) -> LoadedWeight:
        """Steps as torchao makes them."""
        del inputs
        # Only where it was asked for: it takes seconds, and need not be installed.
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
