"""The `pack-quantized` format of compressed-tensors: few bits, consecutive inputs in a word.

Source: the compressed-tensors package (its values are signed, stored with half their range added).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from antiphon.layers.quantization.bit_packing import unpack_bits
from antiphon.layers.quantization.storage import (
    Axis,
    WeightField,
    check_divisible,
    group_of,
    groups,
)
from antiphon.layers.weights import FLOATS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from antiphon.layers.quantization.storage import WeightFields


@dataclass(frozen=True, slots=True)
class PackQuantizedStorage:
    """Quantized values (O, I), and a scale for each group of an output's inputs.

    Attributes:
        bits: Of a value, 4 or 8.
        group: Inputs of a group; 0: all.
        zero_point: Whether zero points are stored, packed along outputs.
        ordered: Activation order (act-order): each input has its own group index.
    """

    bits: int
    group: int
    zero_point: bool = False
    ordered: bool = False

    def fields(self, outputs: int, inputs: int) -> WeightFields:
        """The shape, the group indices, the scales, the zero points and the quantized values."""
        word, shared = 32 // self.bits, groups(inputs, self.group)
        check_divisible(inputs, self.group, "inputs")
        if self.ordered and not isinstance(shared, int):
            # An input may be of any group: every slice needs all of them.
            shared = shared.size(inputs)
        fields = [
            WeightField(".weight_shape", (2,), (torch.int64, torch.int32)),
            WeightField(".weight_scale", (Axis("outputs"), shared), FLOATS),
        ]
        if self.ordered:
            fields.append(
                WeightField(".weight_g_idx", (Axis("inputs"),), (torch.int32, torch.int64))
            )
        if self.zero_point:
            zeros = (Axis("outputs", word), shared)
            fields.append(WeightField(".weight_zero_point", zeros, (torch.int32,)))
        packed = (Axis("outputs"), Axis("inputs", word))
        return (*fields, WeightField(".weight_packed", packed, (torch.int32,)))

    def dequantize(self, stored: Mapping[str, Tensor], outputs: int, inputs: int) -> Tensor:
        """(step - zero) * scale, in float32."""
        steps = unpack_bits(stored[".weight_packed"], self.bits)[:, :inputs]
        scales = stored[".weight_scale"].float()  # (O, G)
        zeros = torch.full_like(scales, 1 << (self.bits - 1), dtype=torch.int32)
        if self.zero_point:
            packed = stored[".weight_zero_point"].t()  # (G, O / word)
            zeros = unpack_bits(packed, self.bits)[:, :outputs].t().int()
        if self.ordered:
            of = group_of(stored[".weight_g_idx"], scales.shape[1])
            wide = steps.float().sub_(zeros.index_select(1, of))
            return wide.mul_(scales.index_select(1, of))
        wide = steps.float().reshape(outputs, scales.shape[1], -1)
        return wide.sub_(zeros[..., None]).mul_(scales[..., None]).view(outputs, inputs)
