"""The block types of llama.cpp whose weights are codes with scales of groups.

A row of a weight is blocks of 32 or 256 inputs. Source: ggml's ggml-common.h and ggml-quants.c.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from antiphon.kernels.cpu.linear import Grouping
from antiphon.layers.quantization.four_bit import MX_GROUPS, powers_of_two
from antiphon.layers.quantization.storage import (
    FOUR_BITS,
    Axis,
    GroupedWeight,
    WeightField,
    WeightFields,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    Decode = Callable[[Tensor], tuple[Tensor, Tensor, Tensor | None]]

IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The values of its codes, which are not evenly spaced."""
FROM_ZERO = tuple(float(code) for code in range(32))
_HALVES = 16
"""Inputs of a block of 32 whose codes are the lower halves of bytes; those of the others follow."""


@dataclass(frozen=True, slots=True)
class GgufStorage:
    """A weight (O, I) of blocks, as they lie in the file."""

    kind: str  # the name of the block type

    def fields(self, outputs: int, inputs: int) -> WeightFields:
        layout = LAYOUTS[self.kind]
        row = Axis("inputs", layout.inputs, layout.block_bytes)
        return (WeightField(".weight", (Axis("outputs"), row), (torch.uint8,)),)

    def grouping(self, inputs: int) -> Grouping | None:
        return LAYOUTS[self.kind].grouping

    def dequantize(self, stored: Mapping[str, Tensor], outputs: int, inputs: int) -> GroupedWeight:
        layout = LAYOUTS[self.kind]
        blocks = stored[".weight"].reshape(-1, layout.block_bytes)
        codes, scales, minimums = layout.decode(blocks)
        return GroupedWeight(
            layout.grouping,
            codes.reshape(outputs, inputs),
            scales.reshape(outputs, -1),
            minimums=None if minimums is None else minimums.reshape(outputs, -1),
        )


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """A type of blocks.

    Attributes:
        inputs: Of a block.
        block_bytes: Its size.
        grouping: What becomes of it.
        decode: Blocks (N, block_bytes) uint8  ->  codes (N, inputs) uint8, scales (N, groups) and
            minimums, if there are any, in float32.
    """

    inputs: int
    block_bytes: int
    grouping: Grouping
    decode: Decode


def _numbers(blocks: Tensor, first: int, count: int = 1) -> Tensor:
    """Float16 numbers of each block, from a byte on: (N, count) float32."""
    return blocks[:, first : first + 2 * count].contiguous().view(torch.float16).float()


def _halves(data: Tensor) -> Tensor:
    """Codes of four bits: the lower halves of some bytes, then the upper ones."""
    return torch.cat((data & 15, data >> 4), dim=-1)


def _bits(data: Tensor) -> Tensor:
    """The bits of bytes, the lowest first: (N, B)  ->  (N, 8 B)."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((data[..., None] >> shifts) & 1).flatten(-2)


def _q4(blocks: Tensor, *, minimum: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    codes = _halves(blocks[:, -_HALVES:])
    return codes, _numbers(blocks, 0), _numbers(blocks, 2) if minimum else None


def _q5(blocks: Tensor, *, minimum: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    upper = _bits(blocks[:, -_HALVES - 4 : -_HALVES])
    codes = _halves(blocks[:, -_HALVES:]) | upper << 4
    return codes, _numbers(blocks, 0), _numbers(blocks, 2) if minimum else None


def _q8(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    return blocks[:, 2:], _numbers(blocks, 0), None


def _mxfp4(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    return _halves(blocks[:, 1:]), powers_of_two(blocks[:, :1]), None


def _q45_k(blocks: Tensor, *, fifth: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Eight groups of 32: 6 bits of each scale and minimum, the upper two apart for the last."""
    packed = blocks[:, 4:16]
    first, second, last = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, (last & 15) | (first >> 6 << 4)), dim=1)
    minimums = torch.cat((second & 63, (last >> 4) | (second >> 6 << 4)), dim=1)
    # Of 64 inputs each, the first half are lower halves of bytes.
    codes = _halves(blocks[:, -128:].reshape(-1, 4, 32))
    if fifth:
        # Bit i of byte j is of input 32 i + j.
        upper = _bits(blocks[:, 16:48, None]).transpose(1, 2)  # (N, 8, 32)
        codes = codes.view(-1, 8, 32) | upper << 4
    return codes, _numbers(blocks, 0) * scales, -_numbers(blocks, 2) * minimums


def _q6_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sixteen groups of 16; of each 128 inputs, four runs of 32 share bytes."""
    low = blocks[:, :128].reshape(-1, 2, 64)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    upper = (high >> shifts & 3).flatten(2)  # (N, 2, 128)
    codes = _halves(low) | upper << 4
    return codes, _numbers(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8), None


def _shifted(bits: int) -> tuple[float, ...]:
    middle = 1 << (bits - 1)
    return tuple(float(code - middle) for code in range(2 * middle))


_HALF, _WHOLE = torch.float16, torch.float32

LAYOUTS: Mapping[str, BlockLayout] = {
    "Q4_0": BlockLayout(
        32,
        18,
        Grouping(4, 32, _HALF, minimums=False, values=FOUR_BITS),
        lambda blocks: _q4(blocks, minimum=False),
    ),
    "Q4_1": BlockLayout(
        32,
        20,
        Grouping(4, 32, _HALF, minimums=True, values=FROM_ZERO[:16]),
        lambda blocks: _q4(blocks, minimum=True),
    ),
    "Q5_0": BlockLayout(
        32,
        22,
        Grouping(5, 32, _HALF, minimums=False, values=_shifted(5)),
        lambda blocks: _q5(blocks, minimum=False),
    ),
    "Q5_1": BlockLayout(
        32,
        24,
        Grouping(5, 32, _HALF, minimums=True, values=FROM_ZERO),
        lambda blocks: _q5(blocks, minimum=True),
    ),
    "Q8_0": BlockLayout(32, 34, Grouping(8, 32, _HALF, minimums=False), _q8),
    "IQ4_NL": BlockLayout(
        32,
        18,
        Grouping(4, 32, _HALF, minimums=False, values=tuple(map(float, IQ4_NL))),
        lambda blocks: _q4(blocks, minimum=False),
    ),
    "MXFP4": BlockLayout(32, 17, MX_GROUPS, _mxfp4),
    "Q4_K": BlockLayout(
        256,
        144,
        Grouping(4, 32, _WHOLE, minimums=True, values=FROM_ZERO[:16]),
        lambda blocks: _q45_k(blocks, fifth=False),
    ),
    "Q5_K": BlockLayout(
        256,
        176,
        Grouping(5, 32, _WHOLE, minimums=True, values=FROM_ZERO),
        lambda blocks: _q45_k(blocks, fifth=True),
    ),
    "Q6_K": BlockLayout(
        256, 210, Grouping(6, 16, _WHOLE, minimums=False, values=_shifted(6)), _q6_k
    ),
}
"""By the names of llama.cpp."""
