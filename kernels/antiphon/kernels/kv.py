"""The paged KV cache of a layer, and writing into it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from antiphon.kernels.fp8 import as_bytes, quantize_fp8

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class KvScales(NamedTuple):
    """Scales of a layer's keys and values in an 8-bit KV cache."""

    key: float = 1.0
    value: float = 1.0


UNSCALED = KvScales()


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSpec:
    """The KV cache of an attention layer: keys and values of each token.

    Attributes:
        heads: Key-value heads.
        head_size: Elements of a head.
        window: A query attends to itself and the window - 1 tokens before it; None: to all before
            it.
        chunked: Texts are split into chunks of `window` tokens, and a query attends only to earlier
            tokens of its own chunk.
    """

    heads: int
    head_size: int
    window: int | None = None
    chunked: bool = False

    @property
    def tensors(self) -> int:
        """Tensors a layer: keys and values."""
        return 2

    def heads_of(self, ranks: int) -> int:
        """Heads on one of `ranks` ranks; replicated if there are fewer heads than ranks."""
        return max(1, self.heads // ranks)

    def token_bytes(self, ranks: int, dtype: torch.dtype) -> int:
        """Bytes of one token in one layer, on one rank."""
        return 2 * self.heads_of(ranks) * self.head_size * dtype.itemsize


@dataclass(frozen=True, slots=True)
class LayerKvCache:
    """The KV cache of one layer, keys and values each (P, S, H, D).

    A layer with a latent cache has the latents in both fields.

    Attributes:
        group: Index of its cache group, which selects the rows' metadata.
        scales: Both 1, unless the KV cache is 8-bit.
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
