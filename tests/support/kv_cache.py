"""What a pool of pages has stored, as tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from antiphon.kernels.kv import read_keys, read_values

if TYPE_CHECKING:
    from torch import Tensor

    from antiphon.model_worker.runner.pools import KvPool


def stored(pool: KvPool, slots: Tensor) -> Tensor:
    """Keys and values at `slots` (T,) in all layers of a pool, (L, 2, T, H, D)."""
    layers = (pool.layer(index) for index in range(len(pool.group.layers)))
    kept = [(read_keys(keys, slots), read_values(values, slots)) for keys, values in layers]
    return torch.stack([torch.stack(layer) for layer in kept])
