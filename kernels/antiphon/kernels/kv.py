"""The paged cache of a layer, and writing into it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from antiphon.kernels.fp8 import as_bytes, quantize_fp8

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class KvScales(NamedTuple):
    """What a layer's keys and values are multiples of, where they are kept in eight bits."""

    key: float = 1.0
    value: float = 1.0


UNSCALED = KvScales()


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSpec:
    """What a layer of attention keeps of each token: keys and values.

    Attributes:
        heads: Key-value heads.
        head_size: Numbers in a head.
        window: A query sees itself and the window - 1 tokens before it; None: all before it.
        chunked: Texts are cut into runs of `window` tokens, and a query sees what comes before it
            in its own run alone.
    """

    heads: int
    head_size: int
    window: int | None = None
    chunked: bool = False

    @property
    def tensors(self) -> int:
        """What a layer has of each token: a key and a value."""
        return 2

    def heads_of(self, ranks: int) -> int:
        """Heads on one of `ranks` ranks; with fewer heads than ranks they are copied."""
        return max(1, self.heads // ranks)

    def token_bytes(self, ranks: int, dtype: torch.dtype) -> int:
        """Of one token in one layer, on one rank."""
        return 2 * self.heads_of(ranks) * self.head_size * dtype.itemsize


@dataclass(frozen=True, slots=True)
class LayerKvCache:
    """Where one layer keeps its keys and values, each (P, S, H, D).

    A layer that keeps latents has them in both places.

    Attributes:
        group: Index of its cache group: which rows of a pass it sees.
        scales: One both, unless they are kept in eight bits.
    """

    group: int
    keys: Tensor
    values: Tensor
    scales: KvScales = UNSCALED


def store_kv(
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    places: Tensor,
    scales: KvScales = UNSCALED,
) -> None:
    """Write this pass's keys and values to their places in the cache, in place.

    Axes: T tokens, P pages, S tokens a page, H kv heads, D head size.
    k, v (T, H, D); keys, values (P, S, H, D), mutated; places (T,) int64, page * S + offset
    """
    store_tensor(k, keys, places, scales.key)
    store_tensor(v, values, places, scales.value)


def store_tensor(new: Tensor, cache: Tensor, places: Tensor, scale: float) -> None:
    """Write new (T, H, D), divided by the scale if it is kept in eight bits, into (P, S, H, D)."""
    kept = quantize_fp8(new, cache.dtype, scale)
    as_bytes(cache).flatten(0, 1).index_copy_(0, places, as_bytes(kept))
