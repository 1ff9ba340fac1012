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

FP8_MAX: Mapping[torch.dtype, float] = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""The greatest number of each format."""


def is_fp8(dtype: torch.dtype) -> bool:
    """Whether numbers are kept so."""
    return dtype in FP8_MAX


def as_bytes(kept: Tensor) -> Tensor:
    """What is kept as torch can gather and write it: bytes, where it is in eight bits."""
    return kept.view(torch.uint8) if is_fp8(kept.dtype) else kept


def quantize_fp8(numbers: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Numbers as they are kept: of eight bits the nearest, ties to even, of what the scale leaves.

    What is greater than the greatest number, infinities too, becomes that; a NaN stays one.
    """
    if not is_fp8(dtype):
        return numbers
    divided = numbers.float() / torch.tensor(scale, device=numbers.device)
    return divided.clamp_(-FP8_MAX[dtype], FP8_MAX[dtype]).to(dtype)


def upcast(kept: Tensor, dtype: torch.dtype) -> Tensor:
    """What is kept as numbers that a model computes in, exactly; the scale is not in them."""
    return kept.to(dtype)
