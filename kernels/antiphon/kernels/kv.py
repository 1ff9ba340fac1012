"""The paged KV cache of a layer, and writing into it.

An 8-bit cache has torch's float8 dtypes, which define the format; torch gathers and copies them as
bytes only. A scale belongs to each tensor: what is stored is the value divided by it.
Source: Micikevicius et al. 2022, arXiv:2209.05433.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


class KvScales(NamedTuple):
    """Scales of a layer's keys and values in an 8-bit KV cache."""

    key: float = 1.0
    value: float = 1.0


UNSCALED = KvScales()


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSpec:
    """The KV cache of an attention layer: keys and values of each token."""

    heads: int  # key-value heads
    head_size: int  # elements of a head
    # A query attends to itself and the window - 1 tokens before it; None: to all before it.
    window: int | None = None
    # Texts are split into chunks of `window` tokens, and a query attends only to earlier tokens of
    # its own chunk.
    chunked: bool = False

    tensors = 2  # a layer: keys and values

    def heads_of(self, ranks: int) -> int:
        """Heads on one of `ranks` ranks; replicated if there are fewer heads than ranks."""
        return max(1, self.heads // ranks)

    def token_bytes(self, ranks: int, dtype: torch.dtype) -> int:
        return 2 * self.heads_of(ranks) * self.head_size * dtype.itemsize


@dataclass(frozen=True, slots=True)
class LayerKvCache:
    """The KV cache of one layer, keys and values each (P, S, H, D).

    A layer with a latent cache has the latents in both fields.
    """

    group: int  # index of its cache group, which selects the rows' metadata
    keys: Tensor
    values: Tensor
    scales: KvScales = UNSCALED  # both 1, unless the KV cache is 8-bit


def store_kv(
    k: Tensor, v: Tensor, keys: Tensor, values: Tensor, places: Tensor, scales: KvScales = UNSCALED
) -> None:
    """Write this pass's keys and values to their slots in the cache, in place.

    Axes: T tokens, P pages, S tokens a page, H kv heads, D head size.
    k, v (T, H, D); keys, values (P, S, H, D), mutated; places (T,) int64, page * S + offset
    """
    store_tensor(k, keys, places, scales.key)
    store_tensor(v, values, places, scales.value)


def store_tensor(new: Tensor, cache: Tensor, places: Tensor, scale: float) -> None:
    """Write new (T, H, D), divided by the scale if the cache is 8-bit, into (P, S, H, D)."""
    kept = quantize_fp8(new, cache.dtype, scale)
    as_bytes(cache).flatten(0, 1).index_copy_(0, places, as_bytes(kept))


FP8_MAX: Mapping[torch.dtype, float] = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""The largest finite value of each format."""


def is_fp8(dtype: torch.dtype) -> bool:
    """Whether a dtype is one of the FP8 formats of a cache."""
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
