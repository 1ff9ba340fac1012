"""How many bytes a page takes."""

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
            kind=GroupKind.FULL if kept.window is None else GroupKind.WINDOW,
            layers=layers,
            page_bytes=page_tokens * len(layers) * kept.token_bytes(ranks, build.dtype),
            page_tokens=page_tokens,
            pages_total=pages,
            window=kept.window,
            shard=Shard(rank=build.tp.rank, ranks=ranks),
        )
        for kept, layers in spec.cache_groups()
    )
