"""Quantized integers of a few bits, packed in 32-bit words: AWQ, GPTQ and `pack-quantized`.

Axes: O outputs, I inputs, G groups of inputs that share a scale and a zero point.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from antiphon.kernels.cpu.linear import Grouping
from antiphon.layers.quantization.storage import (
    FLOATS,
    Axis,
    GroupedWeight,
    LoadedWeight,
    WeightField,
    WeightFields,
    check_divisible,
    groups,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


AWQ_BITS = 4
AWQ_WORD = 32 // AWQ_BITS
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position in a word of each of its outputs, from the lowest bits."""


@dataclass(frozen=True, slots=True)
class AwqStorage:
    """AWQ in AutoAWQ's `gemm` format: values (I, O) of four bits, eight outputs a word.

    `group`: inputs of a group; 0: all.

    Source: Lin et al. 2023, arXiv:2306.00978; the order within a word is that of AutoAWQ's packing.
    """

    group: int

    def fields(self, outputs: int, inputs: int) -> WeightFields:
        check_divisible(outputs, AWQ_WORD, "outputs")
        check_divisible(inputs, self.group, "inputs")
        shared, words = groups(inputs, self.group), Axis("outputs", AWQ_WORD)
        return (
            WeightField(".scales", (shared, Axis("outputs")), FLOATS),
            WeightField(".qzeros", (shared, words), (torch.int32,)),
            WeightField(".qweight", (Axis("inputs"), words), (torch.int32,)),
        )

    def grouping(self, inputs: int) -> Grouping | None:
        return _grouping(AWQ_BITS, self.group or inputs, zeros=True)

    def dequantize(self, stored: Mapping[str, Tensor], outputs: int, inputs: int) -> GroupedWeight:
        grouping = _grouping(AWQ_BITS, inputs // len(stored[".scales"]), zeros=True)
        codes = _in_order(stored[".qweight"]).t()
        zeros = _in_order(stored[".qzeros"]).t()
        return _grouped(grouping, AWQ_BITS, codes, stored[".scales"].t(), zeros)


@dataclass(frozen=True, slots=True)
class GptqStorage:
    """GPTQ as stored by AutoGPTQ and GPTQModel: values (I, O), consecutive inputs in a word.

    Source: Frantar et al. 2022, arXiv:2210.17323.
    """

    bits: int  # of a value: 2, 4 or 8
    group: int  # inputs of a group; 0: all
    ordered: bool = False  # activation order (act-order): each input has its own group index
    zero_added: int = 1  # to be added to the stored zero points: 1 in version 1 of the format

    def fields(self, outputs: int, inputs: int) -> WeightFields:
        word = 32 // self.bits
        check_divisible(outputs, word, "outputs")
        check_divisible(inputs, word, "inputs")
        shared = _shared(inputs, self.group, ordered=self.ordered)
        fields = (
            WeightField(".scales", (shared, Axis("outputs")), FLOATS),
            WeightField(".qzeros", (shared, Axis("outputs", word)), (torch.int32,)),
            WeightField(".qweight", (Axis("inputs", word), Axis("outputs")), (torch.int32,)),
        )
        if not self.ordered:
            return fields
        return (WeightField(".g_idx", (Axis("inputs"),), (torch.int32,)), *fields)

    def grouping(self, inputs: int) -> Grouping | None:
        if self.ordered:
            return None
        return _grouping(self.bits, min(self.group or inputs, inputs), zeros=True)

    def dequantize(self, stored: Mapping[str, Tensor], outputs: int, inputs: int) -> LoadedWeight:
        steps = unpack_bits(stored[".qweight"].t(), self.bits)  # (O, I)
        zeros = unpack_bits(stored[".qzeros"], self.bits).int() + self.zero_added  # (G, O)
        zeros = (zeros & ((1 << self.bits) - 1)).t()
        scales = stored[".scales"].float().t()  # (O, G)
        if self.ordered:
            return _dequantize_ordered(steps, zeros, scales, stored[".g_idx"])
        # Of a slice, the last group may be shorter than that of the weight.
        group = min(self.group or inputs, inputs) if scales.shape[1] > 1 else inputs
        return _grouped(_grouping(self.bits, group, zeros=True), self.bits, steps, scales, zeros)


@dataclass(frozen=True, slots=True)
class PackQuantizedStorage:
    """The `pack-quantized` format of compressed-tensors: values (O, I), consecutive inputs a word.

    Values are signed, and stored with half their range added.
    """

    bits: int  # of a value, 4 or 8
    group: int  # inputs of a group; 0: all
    zero_point: bool = False  # whether zero points are stored, packed along outputs
    ordered: bool = False  # activation order (act-order): each input has its own group index

    def fields(self, outputs: int, inputs: int) -> WeightFields:
        word = 32 // self.bits
        check_divisible(inputs, self.group, "inputs")
        shared = _shared(inputs, self.group, ordered=self.ordered)
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

    def grouping(self, inputs: int) -> Grouping | None:
        if self.ordered:
            return None
        return _grouping(self.bits, self.group or inputs, zeros=self.zero_point)

    def dequantize(self, stored: Mapping[str, Tensor], outputs: int, inputs: int) -> LoadedWeight:
        steps = unpack_bits(stored[".weight_packed"], self.bits)[:, :inputs]
        scales = stored[".weight_scale"].float()  # (O, G)
        zeros = None
        if self.zero_point:
            packed = stored[".weight_zero_point"].t()  # (G, O / word)
            zeros = unpack_bits(packed, self.bits)[:, :outputs].t().int()
        if self.ordered:
            if zeros is None:
                zeros = torch.full_like(scales, 1 << (self.bits - 1), dtype=torch.int32)
            return _dequantize_ordered(steps, zeros, scales, stored[".weight_g_idx"])
        grouping = _grouping(self.bits, inputs // scales.shape[1], zeros=self.zero_point)
        return _grouped(grouping, self.bits, steps, scales, zeros)


def unpack_bits(words: Tensor, bits: int) -> Tensor:
    """Unpack unsigned values of 2, 4 or 8 bits, the lowest bits of a word first.

    words (..., N) int32  ->  (..., N * 32 / bits) uint8
    """
    # As bytes, which moves a quarter of the memory of words; the lowest byte comes first.
    apart = words.contiguous().view(torch.uint8)
    if bits == 8:
        return apart
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=words.device)
    return ((apart[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)


def _grouping(bits: int, group: int, *, zeros: bool) -> Grouping:
    """Of unsigned values, whose middle is stored as zero."""
    if bits == 8:
        return Grouping(8, group, torch.float32, minimums=zeros)
    middle = 1 << (bits - 1)
    values = tuple(float(code - middle) for code in range(16))
    return Grouping(4, group, torch.float32, minimums=zeros, values=values)


def _grouped(
    grouping: Grouping, bits: int, codes: Tensor, scales: Tensor, zeros: Tensor | None
) -> GroupedWeight:
    """A weight of codes (O, I) uint8 with so many bits, scales and zeros (O, G)."""
    middle = 1 << (bits - 1)
    if bits == 8:
        codes = codes ^ middle  # signed, as a byte
    below = None if zeros is None else zeros.float() - middle
    return GroupedWeight(grouping, codes, scales.float(), zeros=below)


def _in_order(words: Tensor) -> Tensor:
    """AWQ's values in the order of outputs: (N, O / 8)  ->  (N, O)."""
    apart = unpack_bits(words, AWQ_BITS).view(len(words), -1, AWQ_WORD)
    return apart[..., AWQ_PLACES].flatten(1)


def _shared(inputs: int, group: int, *, ordered: bool) -> Axis | int:
    shared = groups(inputs, group)
    # With activation order, an input may be of any group: every slice needs all of them.
    return shared.size(inputs) if ordered and not isinstance(shared, int) else shared


def _dequantize_ordered(steps: Tensor, zeros: Tensor, scales: Tensor, group_of: Tensor) -> Tensor:
    """(step - zero) * scale, with the group index of each input, (I,).

    Raises:
        ValueError: A group index is out of range.
    """
    count = scales.shape[1]
    if bool(((group_of < 0) | (group_of >= count)).any()):
        raise ValueError(f"group indices of inputs exceed the {count} groups")
    of = group_of.int()
    return steps.float().sub_(zeros.index_select(1, of)).mul_(scales.index_select(1, of))
