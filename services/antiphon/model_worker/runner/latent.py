"""The latent cache of a pass, as layers meet it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from antiphon.kernels.kv import store
from antiphon.kernels.latent import LatentRows, LatentSizes, latent_attention
from antiphon.kernels.rotary import rotary

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from antiphon.kernels.attention import AttentionRows
    from antiphon.kernels.kv import LayerCache
    from antiphon.kernels.ops import Ops
    from antiphon.kernels.rotary import Rotations
    from antiphon.layers.context import LatentManner
    from antiphon.model_worker.model.spec import ModelSpec


def latent_groups(spec: ModelSpec) -> dict[int, LatentSizes]:
    """Which cache groups keep latents, and of which sizes."""
    kept = [kept for kept, _ in spec.cache_groups()]
    return {index: sizes for index, sizes in enumerate(kept) if isinstance(sizes, LatentSizes)}


def latent_rows(
    groups: Mapping[int, LatentSizes], rows: tuple[AttentionRows, ...], *, absorbed: bool
) -> dict[int, LatentRows]:
    """The rows of a pass as latent cache groups see them; `absorbed` as in `LatentRows`."""
    return {
        index: LatentRows(rows[index], sizes, absorbed=absorbed) for index, sizes in groups.items()
    }


@dataclass(frozen=True, slots=True)
class PagedLatentAttend:
    """An `AttendLatent` over pages."""

    ops: Ops
    layers: Mapping[int, LayerCache]
    groups: Mapping[int, LatentRows]
    rotations: Rotations

    def __call__(self, layer: int, q: Tensor, latents: Tensor, manner: LatentManner) -> Tensor:
        """Rotate, keep this pass's latents, and attend over all of each row's."""
        cache = self.layers[layer]
        rows = self.groups[cache.group]
        cos, sin = self.rotations.of(manner.rotary).by_token
        q = _turned(q, rows.sizes.content, cos, sin)
        kept = _turned(latents[:, None], rows.sizes.latent, cos, sin)
        store(kept, cache.keys, rows.rows.write_places, cache.scales.key)
        attend = self.ops.paged_attention
        return latent_attention(q, cache, rows, manner.heads, manner.scale, attend)


def _turned(heads: Tensor, first: int, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads (T, H, D) with the part from `first` on rotated."""
    return torch.cat((heads[..., :first], rotary(heads[..., first:], cos, sin)), dim=-1)
