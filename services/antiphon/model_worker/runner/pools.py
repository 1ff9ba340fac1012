"""The cache groups of a model, and their pools of pages and states as tensors.

Axes: L layers of the group, P pages of a pool, N pages that are copied, S places of states, H
matrices, K taps of a convolution, C its channels, I rows and J columns of a matrix.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
import torch

from antiphon.kernels.attention import KvShape, NoCache
from antiphon.kernels.cpu.extension import pool_zeros
from antiphon.kernels.kv import (
    CrossKvSpec,
    KvSpec,
    beside,
    key_pages_shape,
    row_pages_shape,
    value_pages_shape,
    zero_slots,
)
from antiphon.kernels.latent import LatentSizes
from antiphon.kernels.recurrent import StateSpec
from antiphon.layers.attention import AttentionSpec
from antiphon.layers.mla import LatentSpec
from antiphon.model_worker.cache.groups import HOLE, CacheGroup, CacheTensor, GroupKind
from antiphon.model_worker.model.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from antiphon.layers.weights import BuildContext
    from antiphon.model_worker.model.load import LoadedModel
    from antiphon.model_worker.model.spec import CacheSpec, ModelSpec

    Bytes = NDArray[np.uint8]

ALIGNMENT: Final = 64
"""Bytes: tensors of a group begin at a cache line, whatever their dtypes."""


def cache_groups(
    spec: ModelSpec, build: BuildContext, *, page_tokens: int, pages: int, states: int = 64
) -> tuple[CacheGroup, ...]:
    """The model's cache groups, each with a pool of `pages` pages or `states`.

    All ranks have the same groups, each with its layers of them: maybe none, on a pipeline stage.

    Raises:
        ModelLoadError: The chunks of chunked attention are not whole pages.
    """
    here = build.stage_layers(len(spec.layers))
    return tuple(
        _group(
            cache,
            tuple(layer for layer in layers if layer in here),
            build,
            page_tokens,
            states if isinstance(cache, StateSpec) else pages,
        )
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


def cross_group(
    cache: CrossKvSpec, spec: ModelSpec, build: BuildContext, *, page_tokens: int, slots: int
) -> CacheGroup:
    """The cache group of cross attention, with as many pages as the sequences of all slots need."""
    heads = cache.heads_of(build.of_mixers.tp.ranks)
    return CacheGroup(
        kind=GroupKind.CROSS,
        layers=tuple(range(len(spec.layers))),
        tensors=_keys_and_values(build, heads, cache.head_size),
        page_tokens=page_tokens,
        pages_total=slots * -(-cache.source_tokens // page_tokens),
    )


def attention_of(
    spec: ModelSpec, index: int
) -> tuple[AttentionSpec | LatentSpec, KvSpec | LatentSizes]:
    """An attention layer of a group and its cache spec, which all layers of the group share."""
    _, layers = spec.cache_groups()[index]
    mixers = spec.layers[layers[0]].mixers
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
    ranks = model.build.of_mixers.tp.ranks
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
        latent=cache.latent if isinstance(cache, LatentSizes) else None,
    )


def _group(
    cache: CacheSpec, layers: tuple[int, ...], build: BuildContext, page_tokens: int, total: int
) -> CacheGroup:
    ranks = build.of_mixers.tp.ranks
    kind, tensors = GroupKind.PASS, tuple[CacheTensor, ...]()
    if isinstance(cache, StateSpec):
        kind = GroupKind.STATE
        tensors = (
            _declared("convolution", build.dtype, cache.convolved(ranks)),
            _declared("recurrence", torch.float32, cache.matrices(ranks)),
        )
    elif not isinstance(cache, NoCache):
        _refuse_cut_pages(cache, page_tokens)
        kind = GroupKind.FULL if cache.window is None else GroupKind.WINDOW
        heads, size = cache.heads_of(ranks), cache.head_size
        tensors = _keys_and_values(build, heads, size)
        if isinstance(cache, LatentSizes):
            kind = GroupKind.LATENT
            tensors = (_declared("latents", build.kv_dtype, (heads, size)),)
    return CacheGroup(
        kind=kind,
        layers=layers,
        tensors=tensors,
        page_tokens=page_tokens,
        pages_total=total,
        window=cache.window if isinstance(cache, KvSpec) else None,
    )


def _keys_and_values(build: BuildContext, heads: int, size: int) -> tuple[CacheTensor, ...]:
    """What `KvPool` lays out of keys and values."""
    if build.page_layout == "words":
        return (_declared("keys and values", build.kv_dtype, (heads, 2, size)),)
    return tuple(_declared(name, build.kv_dtype, (heads, size)) for name in ("keys", "values"))


def _declared(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> CacheTensor:
    return CacheTensor(name=name, dtype=str(dtype).removeprefix("torch."), shape=shape)


def _refuse_cut_pages(cache: KvSpec | LatentSizes, page_tokens: int) -> None:
    run = cache.window if isinstance(cache, KvSpec) and cache.chunked else None
    if run is not None and run % page_tokens:
        raise ModelLoadError(
            f"config.json: attention_chunk_size {run}: pages of {page_tokens} tokens do not fit in"
        )


class GroupMemory:
    """The memory of one cache group: what it declares, for all its pages.

    Of each tensor that the group declares, the pages of a layer lie one after the other, and the
    layers likewise: so a page is read and written in one operation a tensor. Behind the pages of
    the group are those that no request has.
    """

    def __init__(self, group: CacheGroup, device: torch.device, pages_beside: int = 0) -> None:
        self.group = group
        pages = group.pages_total + pages_beside
        page_bytes = [group.page_entries * tensor.entry_bytes for tensor in group.tensors]
        self._shapes = [(len(group.layers), pages, size) for size in page_bytes]
        sizes = [-(-math.prod(shape) // ALIGNMENT) * ALIGNMENT for shape in self._shapes]
        self.data = pool_zeros(sum(sizes), dtype=torch.uint8, device=device)
        self.tensors: list[Tensor] = []
        """Those that the group declares, (L, P, bytes of a page in one layer)."""
        start = 0
        for shape, size in zip(self._shapes, sizes, strict=True):
            self.tensors.append(self.data[start : start + math.prod(shape)].view(shape))
            start += size

    def layer(self, index: int) -> list[Tensor]:
        """Each declared tensor of the group's `index`-th layer, (P, bytes of a page in it)."""
        return [tensor[index] for tensor in self.tensors]

    def read(self, pages: Sequence[int], out: memoryview) -> None:
        """Copy pages to bytes: of each tensor, those of each layer, in the order given."""
        for tensor, packed in zip(self.tensors, self.packed(len(pages), out), strict=True):
            # By numpy, in one thread: it runs beside the threads of a forward pass. Holes were
            # left out. `clip` needs no copy of its own, as `raise` does.
            np.take(tensor.numpy(), np.asarray(pages, np.intp), axis=1, out=packed, mode="clip")

    def write(self, pages: Sequence[int], data: memoryview) -> None:
        """Copy what `read` has copied of so many pages to these; a hole leaves a page out."""
        for tensor, packed in zip(self.tensors, self.packed(len(pages), data), strict=True):
            stored = tensor.numpy()
            for place, page in enumerate(pages):
                if page != HOLE:
                    stored[:, page] = packed[:, place]

    def packed(self, count: int, data: memoryview) -> Iterator[Bytes]:
        """The part of each tensor in the bytes of so many pages, (L, N, bytes)."""
        start = 0
        for layers, _, size in self._shapes:
            end = start + layers * count * size
            yield np.frombuffer(data[start:end], np.uint8).reshape(layers, count, size)
            start = end


class KvPool:
    """The KV cache of one cache group, pages as `antiphon.kernels.kv` lays them out."""

    def __init__(
        self, group: CacheGroup, spec: KvSpec | LatentSizes | CrossKvSpec, build: BuildContext
    ) -> None:
        self.group = group
        heads, size = spec.heads_of(build.of_mixers.tp.ranks), spec.head_size
        # Rows that pad a step write somewhere, too.
        pages_beside = int(build.device_kind != "cpu")
        page = (group.pages_total + pages_beside, group.page_tokens, heads, size)
        if build.page_layout == "rows":
            shapes = (row_pages_shape(*page),) * 2
        else:
            shapes = key_pages_shape(*page, build.dtype), value_pages_shape(*page, build.dtype)
        self._shapes = shapes[: spec.tensors]
        self._beside = spec.tensors == 2 and build.page_layout == "words"
        self.dtype = build.kv_dtype
        self.memory = GroupMemory(group, build.device, pages_beside)

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
        tensors = self.memory.layer(index)
        if self._beside:
            return list(beside(tensors[0].view(self.dtype), self._shapes[0], self._shapes[1]))
        pairs = zip(tensors, self._shapes, strict=True)
        return [_viewed(pages, self.dtype, shape) for pages, shape in pairs]


class StatePool:
    """Convolution states, (L, S, K - 1, C), and recurrent states, (L, S, H, I, J).

    A place is undefined until it is written as a whole, and is read only after that.
    """

    def __init__(self, group: CacheGroup, spec: StateSpec, build: BuildContext) -> None:
        self.group = group
        ranks = build.of_mixers.tp.ranks
        self._convolved = (build.dtype, (group.pages_total, *spec.convolved(ranks)))
        self._matrices = (torch.float32, (group.pages_total, *spec.matrices(ranks)))
        self.memory = GroupMemory(group, build.device)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Both of the group's `index`-th layer: (S, K - 1, C) and (S, H, I, J)."""
        convolved, matrices = self.memory.layer(index)
        return _viewed(convolved, *self._convolved), _viewed(matrices, *self._matrices)


def _viewed(pages: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return pages.view(dtype).view(shape)
