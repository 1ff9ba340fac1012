"""How many bytes a page takes."""

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
"""Places of recurrent states where nobody says how many. A model without any has none."""


def cache_groups(
    spec: ModelSpec, build: BuildContext, *, page_tokens: int, pages: int, states: int = STATES
) -> tuple[CacheGroup, ...]:
    """The model's cache groups on this rank, each with a pool of `pages` pages or `states`.

    Raises:
        ModelLoadError: Texts are cut into runs of tokens that are not whole pages.
    """
    return tuple(
        _group(kept, layers, build, page_tokens, states if isinstance(kept, StateSpec) else pages)
        for kept, layers in spec.cache_groups()
    )


def _group(
    kept: CacheSpec, layers: tuple[int, ...], build: BuildContext, page_tokens: int, total: int
) -> CacheGroup:
    ranks = build.tp.ranks
    if isinstance(kept, StateSpec):
        kind, page_bytes = GroupKind.STATE, kept.state_bytes(ranks, build.dtype)
    elif isinstance(kept, NoCache):
        kind, page_bytes = GroupKind.PASS, 0
    else:
        _refuse_cut_pages(kept, page_tokens)
        kind = _kind(kept)
        page_bytes = page_tokens * kept.token_bytes(ranks, build.kv_dtype)
    return CacheGroup(
        kind=kind,
        layers=layers,
        page_bytes=len(layers) * page_bytes,
        page_tokens=page_tokens,
        pages_total=total,
        window=kept.window if isinstance(kept, KvSpec) else None,
        shard=Shard(rank=build.tp.rank, ranks=ranks),
    )


def _kind(kept: KvSpec | LatentSizes) -> GroupKind:
    if isinstance(kept, LatentSizes):
        return GroupKind.LATENT
    return GroupKind.FULL if kept.window is None else GroupKind.WINDOW


def _refuse_cut_pages(kept: KvSpec | LatentSizes, page_tokens: int) -> None:
    run = kept.window if isinstance(kept, KvSpec) and kept.chunked else None
    if run is not None and run % page_tokens:
        raise ModelLoadError(
            f"config.json: attention_chunk_size {run}: pages of {page_tokens} tokens do not fit in"
        )
