"""The cache groups of a model and how many bytes a page takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.kernels.bidirectional import NoCache
from antiphon.kernels.kv import KvSpec
from antiphon.kernels.latent import LatentSizes
from antiphon.kernels.states import StateSpec
from antiphon.model_worker.cache.groups import CacheGroup, GroupKind, Shard
from antiphon.model_worker.model.errors import ModelLoadError

if TYPE_CHECKING:
    from antiphon.layers.weights import BuildContext
    from antiphon.model_worker.model.spec import CacheSpec, ModelSpec

STATES = 64
"""Default number of recurrent states. Models without recurrent layers have none."""


def cache_groups(
    spec: ModelSpec, build: BuildContext, *, page_tokens: int, pages: int, states: int = STATES
) -> tuple[CacheGroup, ...]:
    """The model's cache groups on this rank, each with a pool of `pages` pages or `states`.

    Raises:
        ModelLoadError: The chunks of chunked attention are not whole pages.
    """
    return tuple(
        _group(cache, layers, build, page_tokens, states if isinstance(cache, StateSpec) else pages)
        for cache, layers in spec.cache_groups()
    )


def _group(
    cache: CacheSpec, layers: tuple[int, ...], build: BuildContext, page_tokens: int, total: int
) -> CacheGroup:
    ranks = build.tp.ranks
    if isinstance(cache, StateSpec):
        kind, page_bytes = GroupKind.STATE, cache.state_bytes(ranks, build.dtype)
    elif isinstance(cache, NoCache):
        kind, page_bytes = GroupKind.PASS, 0
    else:
        _refuse_cut_pages(cache, page_tokens)
        kind = _kind(cache)
        page_bytes = page_tokens * cache.token_bytes(ranks, build.kv_dtype)
    return CacheGroup(
        kind=kind,
        layers=layers,
        page_bytes=len(layers) * page_bytes,
        page_tokens=page_tokens,
        pages_total=total,
        window=cache.window if isinstance(cache, KvSpec) else None,
        shard=Shard(rank=build.tp.rank, ranks=ranks),
    )


def _kind(cache: KvSpec | LatentSizes) -> GroupKind:
    if isinstance(cache, LatentSizes):
        return GroupKind.LATENT
    return GroupKind.FULL if cache.window is None else GroupKind.WINDOW


def _refuse_cut_pages(cache: KvSpec | LatentSizes, page_tokens: int) -> None:
    run = cache.window if isinstance(cache, KvSpec) and cache.chunked else None
    if run is not None and run % page_tokens:
        raise ModelLoadError(
            f"config.json: attention_chunk_size {run}: pages of {page_tokens} tokens do not fit in"
        )
