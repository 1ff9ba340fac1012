"""Numbers of eight bits, as keys and values may be kept: e4m3 and e5m2.

They lie in a cache as what torch calls them, which says how to read them; torch moves them about
as bytes only. A scale belongs to each: what is kept is the number divided by it.

Source: Micikevicius et al. 2022, arXiv:2209.05433.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

GREATEST: Mapping[torch.dtype, float] = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""The greatest number of each format."""


def in_eight_bits(dtype: torch.dtype) -> bool:
    """Whether numbers are kept so."""
    return dtype in GREATEST


def raw(kept: Tensor) -> Tensor:
    """What is kept as torch can gather and write it: bytes, where it is in eight bits."""
    return kept.view(torch.uint8) if in_eight_bits(kept.dtype) else kept


def rounded(numbers: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Numbers as they are kept: of eight bits the nearest, ties to even, of what the scale leaves.

    What is greater than the greatest number, infinities too, becomes that; a NaN stays one.
    """
    if not in_eight_bits(dtype):
        return numbers
    divided = numbers.float() / torch.tensor(scale, device=numbers.device)
    return divided.clamp_(-GREATEST[dtype], GREATEST[dtype]).to(dtype)


def widened(kept: Tensor, dtype: torch.dtype) -> Tensor:
    """What is kept as numbers that a model computes in, exactly; the scale is not in them."""
    return kept.to(dtype)
