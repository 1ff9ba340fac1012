"""FP8 formats of the KV cache: e4m3 and e5m2.

The cache has torch's float8 dtypes, which define the format; torch gathers and copies them as bytes
only. A scale belongs to each tensor: what is stored is the value divided by it.

Source: Micikevicius et al. 2022, arXiv:2209.05433.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

FP8_MAX: Mapping[torch.dtype, float] = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""The largest finite value of each format."""


def is_fp8(dtype: torch.dtype) -> bool:
    """Whether a dtype is FP8."""
    return dtype in FP8_MAX


def as_bytes(stored: Tensor) -> Tensor:
    """A view that torch can gather and write: bytes, for FP8."""
    return stored.view(torch.uint8) if is_fp8(stored.dtype) else stored


def quantize_fp8(values: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Quantize to FP8 after dividing by the scale, rounding to nearest, ties to even.

    Values beyond the largest finite value, infinities included, saturate; a NaN stays a NaN.
    """
    if not is_fp8(dtype):
        return values
    divided = values.float() / torch.tensor(scale, device=values.device)
    return divided.clamp_(-FP8_MAX[dtype], FP8_MAX[dtype]).to(dtype)


def upcast(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert stored values to the dtype of the model, exactly; the scale is not applied."""
    return stored.to(dtype)
