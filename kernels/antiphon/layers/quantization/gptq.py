"""GPTQ as stored by AutoGPTQ and GPTQModel: 2, 4 or 8 bits, consecutive inputs in a word.

Source: Frantar et al. 2022, arXiv:2210.17323; the two versions differ in their zero points.
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
class GptqStorage:
    """Quantized values (I, O), with a zero point and a scale for each group of inputs and output.

    Attributes:
        bits: Of a value.
        group: Inputs of a group; 0: all.
        ordered: Activation order (act-order): each input has its own group index.
        zero_added: To be added to the stored zero points: 1 in version 1 of the format.
    """

    bits: int
    group: int
    ordered: bool = False
    zero_added: int = 1

    def fields(self, outputs: int, inputs: int) -> WeightFields:
        """The group indices, the scales, the zero points and the quantized values."""
        word = 32 // self.bits
        check_divisible(outputs, word, "outputs")
        check_divisible(inputs, word, "inputs")
        shared = groups(inputs, self.group)
        if self.ordered and not isinstance(shared, int):
            # An input may be of any group: every slice needs all of them.
            shared = shared.size(inputs)
        fields = (
            WeightField(".scales", (shared, Axis("outputs")), FLOATS),
            WeightField(".qzeros", (shared, Axis("outputs", word)), (torch.int32,)),
            WeightField(".qweight", (Axis("inputs", word), Axis("outputs")), (torch.int32,)),
        )
        if not self.ordered:
            return fields
        return (WeightField(".g_idx", (Axis("inputs"),), (torch.int32,)), *fields)

    def dequantize(self, stored: Mapping[str, Tensor], outputs: int, inputs: int) -> Tensor:
        """(step - zero) * scale, in float32."""
        steps = unpack_bits(stored[".qweight"].t(), self.bits)  # (O, I)
        zeros = unpack_bits(stored[".qzeros"], self.bits).int() + self.zero_added  # (G, O)
        zeros = (zeros & ((1 << self.bits) - 1)).t()
        scales = stored[".scales"].float().t()  # (O, G)
        if self.ordered:
            of = group_of(stored[".g_idx"], scales.shape[1])
            wide = steps.float().sub_(zeros.index_select(1, of))
            return wide.mul_(scales.index_select(1, of))
        # The last group of a weight may be shorter.
        short = -inputs % min(self.group or inputs, inputs)
        wide = torch.nn.functional.pad(steps, (0, short)).float()
        apart = wide.view(outputs, scales.shape[1], -1)
        apart.sub_(zeros[..., None]).mul_(scales[..., None])
        return wide[:, :inputs]
