"""The cache groups of a model, and their pools of pages and states as tensors.

Axes: L layers of the group, N tensors a layer (keys and values, or latents alone), P pages,
S places of states, H matrices, K taps of a convolution, C its channels, I rows and J columns of a
matrix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import torch

from antiphon.kernels.attention import KvShape, NoCache
from antiphon.kernels.cpu.extension import pool_zeros
from antiphon.kernels.kv import (
    KvSpec,
    is_fp8,
    key_pages_shape,
    page_slots,
    value_pages_shape,
    zero_slots,
)
from antiphon.kernels.latent import LatentSizes
from antiphon.kernels.recurrent import StateSpec
from antiphon.layers.attention import AttentionSpec
from antiphon.layers.mla import LatentSpec
from antiphon.model_worker.cache.groups import CacheGroup, GroupKind, Shard
from antiphon.model_worker.model.errors import ModelLoadError

if TYPE_CHECKING:
    from torch import Tensor

    from antiphon.layers.weights import BuildContext
    from antiphon.model_worker.model.load import LoadedModel
    from antiphon.model_worker.model.spec import CacheSpec, ModelSpec


def cache_groups(
    spec: ModelSpec, build: BuildContext, *, page_tokens: int, pages: int, states: int = 64
) -> tuple[CacheGroup, ...]:
    """The model's cache groups on this rank, each with a pool of `pages` pages or `states`.

    Raises:
        ModelLoadError: The chunks of chunked attention are not whole pages.
    """
    return tuple(
        _group(cache, layers, build, page_tokens, states if isinstance(cache, StateSpec) else pages)
        for cache, layers in spec.cache_groups()
    )


def draft_group(
    spec: ModelSpec, build: BuildContext, *, page_tokens: int, pages: int
) -> CacheGroup:
    """The cache group of a draft model.

    Raises:
        ModelLoadError: Its layers do not all cache the same keys and values of every token.
    """
    groups = cache_groups(spec, build, page_tokens=page_tokens, pages=pages)
    if kinds := {group.kind for group in groups} - {GroupKind.FULL}:
        raise ModelLoadError(
            f"a draft model must attend to the whole context in every layer, without {min(kinds)} "
            "layers"
        )
    if len(groups) != 1:
        raise ModelLoadError("a draft model must have keys and values of one size in all layers")
    return msgspec.structs.replace(groups[0], kind=GroupKind.DRAFT)


def attention_of(
    spec: ModelSpec, group: CacheGroup
) -> tuple[AttentionSpec | LatentSpec, KvSpec | LatentSizes]:
    """An attention layer of the group and its cache spec, which all layers of the group share."""
    mixers = spec.layers[group.layers[0]].mixers
    mixer = next(mixer for mixer in mixers if isinstance(mixer, AttentionSpec | LatentSpec))
    assert not isinstance(mixer.cache, NoCache), "a group of pages"
    return mixer, mixer.cache


def kv_shape(
    model: LoadedModel,
    group: CacheGroup,
    mixer: AttentionSpec | LatentSpec,
    cache: KvSpec | LatentSizes,
) -> KvShape:
    """What attention needs to know of a group, whose layers have this mixer and cache."""
    ranks = model.build.tp.ranks
    heads = cache.heads_of(ranks)
    chunked = isinstance(cache, KvSpec) and cache.chunked
    return KvShape(
        page_tokens=group.page_tokens,
        heads=heads,
        queries_per_head=mixer.query_heads // ranks // heads,
        head_size=cache.head_size,
        dtype=model.build.dtype,
        window=None if chunked else group.window,
        chunk=group.window if chunked else None,
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
        kind = GroupKind.FULL if cache.window is None else GroupKind.WINDOW
        if isinstance(cache, LatentSizes):
            kind = GroupKind.LATENT
        page_bytes = page_slots(page_tokens) * cache.token_bytes(ranks, build.kv_dtype)
    return CacheGroup(
        kind=kind,
        layers=layers,
        page_bytes=len(layers) * page_bytes,
        page_tokens=page_tokens,
        pages_total=total,
        window=cache.window if isinstance(cache, KvSpec) else None,
        shard=Shard(rank=build.tp.rank, ranks=ranks),
    )


def _refuse_cut_pages(cache: KvSpec | LatentSizes, page_tokens: int) -> None:
    run = cache.window if isinstance(cache, KvSpec) and cache.chunked else None
    if run is not None and run % page_tokens:
        raise ModelLoadError(
            f"config.json: attention_chunk_size {run}: pages of {page_tokens} tokens do not fit in"
        )


class KvPool:
    """The KV cache of one cache group, (L, N, P) pages as `antiphon.kernels.kv` lays them out."""

    def __init__(self, group: CacheGroup, spec: KvSpec | LatentSizes, build: BuildContext) -> None:
        self.group = group
        heads, size = spec.heads_of(build.tp.ranks), spec.head_size
        page = (group.pages_total, group.page_tokens, heads, size, build.dtype)
        self._shapes = (key_pages_shape(*page), value_pages_shape(*page))[: spec.tensors]
        self.dtype = build.kv_dtype
        self._data = pool_zeros(
            *(len(group.layers), spec.tensors, *self._shapes[0]),
            dtype=torch.uint8 if is_fp8(build.kv_dtype) else build.kv_dtype,
            device=build.device,
        )

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Pages of keys and of values of the group's `index`-th layer; latents are both."""
        tensors = self._layer(index)
        return tensors[0], tensors[-1]

    def zero(self, slots: Tensor) -> None:
        """Zero the tokens at `slots` in every layer."""
        for index in range(len(self.group.layers)):
            for place, pages in enumerate(self._layer(index)):
                zero_slots(pages, slots, values=place == 1)

    def _layer(self, index: int) -> list[Tensor]:
        layer = self._data[index].view(self.dtype)
        return [pages.view(shape) for pages, shape in zip(layer, self._shapes, strict=True)]


class StatePool:
    """Convolution states, (L, S, K - 1, C), and recurrent states, (L, S, H, I, J).

    A place is undefined until it is written as a whole, and is read only after that.
    """

    def __init__(self, group: CacheGroup, spec: StateSpec, build: BuildContext) -> None:
        self.group = group
        ranks, places = build.tp.ranks, (len(group.layers), group.pages_total)
        self._convolved = torch.zeros(
            (*places, *spec.convolved(ranks)), dtype=build.dtype, device=build.device
        )
        self._matrices = torch.zeros(
            (*places, *spec.matrices(ranks)), dtype=torch.float32, device=build.device
        )

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Both of the group's `index`-th layer: (S, K - 1, C) and (S, H, I, J)."""
        return self._convolved[index], self._matrices[index]
