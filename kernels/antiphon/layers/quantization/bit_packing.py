"""Unpacks small integers from words, and looks up 4-bit codes."""

from __future__ import annotations

import torch
from torch import Tensor

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""E2M1: a sign, two bits of exponent, one of mantissa."""


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


def unpack_nibbles(pairs: Tensor, *, high_first: bool) -> Tensor:
    """Unpack the two 4-bit values of each byte: (..., N) uint8  ->  (..., 2 N) uint8."""
    low, high = pairs & 15, pairs >> 4
    return torch.stack((high, low) if high_first else (low, high), dim=-1).flatten(-2)


def lookup(codes: Tensor, table: Tensor) -> Tensor:
    """The value of each code: codes (...,) uint8, table (16 or 256,)  ->  (...,)."""
    return table.index_select(0, codes.flatten().int()).view(codes.shape)
