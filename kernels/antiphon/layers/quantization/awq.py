"""AWQ in AutoAWQ's `gemm` format: four bits, eight outputs a word.

Source: Lin et al. 2023, arXiv:2306.00978; the order within a word is that of AutoAWQ's packing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from antiphon.layers.quantization.bit_packing import unpack_bits
from antiphon.layers.quantization.storage import Axis, WeightField, check_divisible, groups
from antiphon.layers.weights import FLOATS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from antiphon.layers.quantization.storage import WeightFields

BITS = 4
WORD = 32 // BITS
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position in a word of each of its outputs, from the lowest bits."""


@dataclass(frozen=True, slots=True)
class AwqStorage:
    """Quantized values (I, O), with a zero point and a scale for each group of inputs and output.

    `group`: inputs of a group; 0: all.
    """

    group: int

    def fields(self, outputs: int, inputs: int) -> WeightFields:
        """The scales, the zero points and the quantized values."""
        check_divisible(outputs, WORD, "outputs")
        check_divisible(inputs, self.group, "inputs")
        shared, words = groups(inputs, self.group), Axis("outputs", WORD)
        return (
            WeightField(".scales", (shared, Axis("outputs")), FLOATS),
            WeightField(".qzeros", (shared, words), (torch.int32,)),
            WeightField(".qweight", (Axis("inputs"), words), (torch.int32,)),
        )

    def dequantize(self, stored: Mapping[str, Tensor], outputs: int, inputs: int) -> Tensor:
        """(step - zero) * scale, in float32."""
        apart = (-1, inputs // len(stored[".scales"]), outputs)
        wide = _in_order(stored[".qweight"]).float().view(apart)
        zeros = _in_order(stored[".qzeros"])[:, None]
        scales = stored[".scales"].float()[:, None]
        return wide.sub_(zeros).mul_(scales).view(inputs, outputs).t()


def _in_order(words: Tensor) -> Tensor:
    """Values in the order of outputs: (N, O / 8)  ->  (N, O)."""
    apart = unpack_bits(words, BITS).view(len(words), -1, WORD)
    return apart[..., PLACES].flatten(1)
