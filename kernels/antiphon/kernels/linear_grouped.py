"""A linear of weights whose codes of 4 or 8 bits share a scale in groups of inputs.

Source: Lin et al. 2023, arXiv:2306.00978 (AWQ); Frantar et al. 2022, arXiv:2210.17323 (GPTQ); the
OCP Microscaling Formats specification 1.0 (E2M1); those of ModelOpt (NVFP4).

Axes: T tokens, I inputs, O outputs, G groups of inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (its name in every torch program)

from antiphon.kernels.op import kernel
from antiphon.kernels.triton.backend import triton

if TYPE_CHECKING:
    from torch import Tensor

    from antiphon.kernels.cpu.linear import Grouping

UNIT = 32
"""Inputs whose codes of 4 bits lie together in memory; groups are a multiple, a half, or all."""
HALF = UNIT // 2
"""Groups of codes of 8 bits are a multiple of it."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of codes of 4 bits that are floats; the highest bit is a sign."""
BYTE_MAX = 127


class GroupedMatrix(NamedTuple):
    """Weights value * scale + minimum.

    Of 4 bits, byte 16 * u + b of an output has the code of input 32 * u + b in its low bits, and
    that of input 32 * u + 16 + b in its high ones.
    """

    codes: Tensor  # (O, I / 2) uint8, two codes a byte; or (O, I) int8, the values themselves
    scales: Tensor  # (G, O); in float8_e4m3fn there are tensor scales, and no minimums
    minimums: Tensor | None  # (G, O); None: 0
    group: int  # inputs of a group; the last group may have fewer
    # Of 4 bits, the value of code 0, which those of other codes follow by one; None: E2M1.
    first: int | None = None
    bias: Tensor | None = None  # (O,)
    tensor_scales: Tensor | None = None  # (O,) float32, times the scales of all groups

    @property
    def inputs(self) -> int:
        return self.codes.shape[-1] * (1 if self.codes.dtype is torch.int8 else 2)

    def dequantize(self) -> Tensor:
        """The weights in float32, (O, I)."""
        if self.codes.dtype is torch.int8:
            values = self.codes.float()
        else:
            values = self._table()[_unpacked(self.codes).long()]
        spread = self.scales.float().T.repeat_interleave(self.group, 1)[:, : self.inputs]
        values = values * spread
        if self.tensor_scales is not None:
            return values * self.tensor_scales[:, None]
        if self.minimums is None:
            return values
        return values + self.minimums.float().T.repeat_interleave(self.group, 1)[:, : self.inputs]

    def _table(self) -> Tensor:
        if self.first is None:
            values = torch.tensor([*E2M1, *(-each for each in E2M1)])
        else:
            values = torch.arange(self.first, self.first + 16, dtype=torch.float32)
        return values.to(self.codes.device)


class GroupedCodes(NamedTuple):
    """How the codes of a kind are kept."""

    bits: int  # 4 or 8
    first: int | None = None  # as in `GroupedMatrix`

    def empty(self, *size: int, device: torch.device) -> Tensor:
        """Memory for so many weights; inputs are the last axis."""
        *outputs, inputs = size
        if self.bits == 8:
            return torch.empty((*outputs, inputs), dtype=torch.int8, device=device)
        return torch.empty((*outputs, inputs // 2), dtype=torch.uint8, device=device)


def codes_of(grouping: Grouping, inputs: int) -> GroupedCodes | None:
    """How the codes of weights with so many inputs are kept; None: they cannot be multiplied."""
    values, group = grouping.values, grouping.group
    if inputs % UNIT or (group < inputs and group % HALF):
        return None
    if grouping.bits == 4 and (group >= inputs or group == HALF or group % UNIT == 0):
        if list(values) == [*E2M1, *(-each for each in E2M1)]:
            return GroupedCodes(4)
        first = int(values[0])
        if list(values) == [first + code for code in range(16)]:
            return GroupedCodes(4, first)
    whole = all(value == int(value) and abs(value) <= BYTE_MAX for value in values)
    return GroupedCodes(8) if whole else None


def packed(codes: Tensor) -> Tensor:
    """Put two codes of 4 bits into a byte: (O, I) uint8  ->  (O, I / 2)."""
    low, high = codes.view(len(codes), -1, 2, HALF).unbind(2)
    return (low | (high << 4)).flatten(1)


def _unpacked(codes: Tensor) -> Tensor:
    apart = codes.view(len(codes), -1, HALF)
    return torch.stack([apart & 15, apart >> 4], dim=2).flatten(1)


@kernel("linear.grouped", triton("linear_grouped:linear_grouped", fixed="linear_grouped_fixed"))
def linear_grouped(x: Tensor, weights: GroupedMatrix) -> Tensor:
    """Multiply: x (T, I)  ->  (T, O) in its dtype, bias added.

    Weights are rounded to the dtype of x, as if they had been dequantized while loading; with
    tensor scales they are exact in it without these, which multiply the sums.
    """
    if weights.tensor_scales is not None:
        made = F.linear(x.float(), weights._replace(tensor_scales=None).dequantize())
        made = made * weights.tensor_scales
        return (made if weights.bias is None else made + weights.bias.float()).to(x.dtype)
    return F.linear(x, weights.dequantize().to(x.dtype), weights.bias)
