"""The latent KV cache (MLA) of a forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from antiphon.kernels.kv import store_tensor
from antiphon.kernels.latent import LatentMetadata, LatentSizes, latent_attention
from antiphon.kernels.rotary import apply_rotary

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from antiphon.kernels.attention import AttentionMetadata
    from antiphon.kernels.kv import LayerKvCache
    from antiphon.kernels.ops import Ops
    from antiphon.kernels.rotary import StepCosSin
    from antiphon.layers.context import LatentAttentionParams
    from antiphon.model_worker.model.spec import ModelSpec


def latent_groups(spec: ModelSpec) -> dict[int, LatentSizes]:
    """Which cache groups store latents, with their sizes."""
    caches = [cache for cache, _ in spec.cache_groups()]
    return {index: cache for index, cache in enumerate(caches) if isinstance(cache, LatentSizes)}


def latent_rows(
    groups: Mapping[int, LatentSizes], rows: tuple[AttentionMetadata, ...], *, absorbed: bool
) -> dict[int, LatentMetadata]:
    """The rows of a pass as latent cache groups see them; `absorbed` as in `LatentMetadata`."""
    return {
        index: LatentMetadata(rows[index], sizes, absorbed=absorbed)
        for index, sizes in groups.items()
    }


@dataclass(frozen=True, slots=True)
class PagedLatentAttend:
    """A `LatentAttentionBackend` over pages."""

    ops: Ops
    layers: Mapping[int, LayerKvCache]
    groups: Mapping[int, LatentMetadata]
    rotations: StepCosSin

    def __call__(
        self, layer: int, q: Tensor, latents: Tensor, params: LatentAttentionParams
    ) -> Tensor:
        """Apply RoPE, write this pass's latents, and attend to all of each row's."""
        cache = self.layers[layer]
        rows = self.groups[cache.group]
        cos, sin = self.rotations.of(params.rotary).by_token
        q = _rotated(q, rows.sizes.content, cos, sin)
        rotated = _rotated(latents[:, None], rows.sizes.latent, cos, sin)
        store_tensor(rotated, cache.keys, rows.rows.slot_mapping, cache.scales.key)
        attend = self.ops.paged_attention
        return latent_attention(q, cache, rows, params.heads, params.scale, attend)


def _rotated(heads: Tensor, first: int, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads (T, H, D) with the elements from `first` on rotated."""
    return torch.cat((heads[..., :first], apply_rotary(heads[..., first:], cos, sin)), dim=-1)
