"""Writing keys and values into the paged cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.kernels.op import kernel

if TYPE_CHECKING:
    from torch import Tensor


@kernel("kv.store")
def kv_store(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, places: Tensor) -> None:
    """Write this pass's keys and values to their places in the cache, in place.

    Axes: T tokens, P pages, S tokens a page, H kv heads, D head size.
    k, v (T, H, D); keys, values (P, S, H, D), mutated; places (T,) int64, page * S + offset
    """
    keys.flatten(0, 1).index_copy_(0, places, k)
    values.flatten(0, 1).index_copy_(0, places, v)
