"""How many bytes a page takes, and how many a pass needs beside the pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.model_worker.cache.groups import CacheGroup, GroupKind, Shard

if TYPE_CHECKING:
    from antiphon.layers.weights import Build
    from antiphon.model_worker.model.spec import ModelSpec


def cache_groups(
    spec: ModelSpec, build: Build, *, page_tokens: int, pages: int
) -> tuple[CacheGroup, ...]:
    """The model's cache groups on this rank, each with a pool of `pages` pages."""
    ranks = build.tp.ranks
    return tuple(
        CacheGroup(
            kind=GroupKind.FULL if window is None else GroupKind.WINDOW,
            layers=layers,
            page_bytes=page_tokens * spec.kv_bytes(len(layers), ranks, build.dtype),
            page_tokens=page_tokens,
            pages_total=pages,
            window=window,
            shard=Shard(rank=build.tp.rank, ranks=ranks),
        )
        for window, layers in spec.kv_groups()
    )


def activation_bytes(spec: ModelSpec, build: Build, *, tokens: int, logits: int) -> int:
    """About the most that one pass of `tokens` tokens and `logits` rows of logits holds at once.

    The widest moment of a layer is either block: residual and normalised stream beside the fused
    projection and its result. The logits are float32, and sampling holds three copies.
    """
    item, ranks = build.dtype.itemsize, build.tp.ranks
    attention = (2 * spec.query_heads + 4 * spec.kv_heads) * spec.head_size // ranks
    mlp = 4 * spec.mlp_width // ranks
    layer = tokens * item * (3 * spec.hidden + max(attention, mlp))
    return layer + 3 * logits * spec.vocabulary * 4
