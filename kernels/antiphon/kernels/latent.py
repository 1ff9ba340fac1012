"""Multi-head latent attention (MLA), with a cache of latents that heads expand to keys and values.

It has two forms with the same result. *Expanded*, the keys and values of all heads are computed
from the latents, for ordinary attention: cheaper where many queries attend to few keys, as in
prefill. *Absorbed*, the key projection is applied to the queries instead, so that attention runs
over the latents themselves, one kv head for all query heads: cheaper where few queries attend to
many keys, as in decode.

Axes: T tokens, Q query heads, N cached tokens of the selected rows, P pages, S tokens a page,
R latent size, C content size and O position size of a head's keys, V value size.

Source: DeepSeek-AI 2024, arXiv:2405.04434, section 2.1 and appendix C.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (its name in every torch program)

from antiphon.kernels.attention import AttentionMetadata, KvShape
from antiphon.kernels.kv import (
    UNSCALED,
    KvScales,
    LayerKvCache,
    key_pages_shape,
    page_slots,
    read_keys,
    store_keys,
    store_kv,
    value_pages_shape,
)
from antiphon.kernels.op import kernel
from antiphon.kernels.rotary import apply_rotary
from antiphon.kernels.triton.backend import triton

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray
    from torch import Tensor

    PagedAttention = Callable[[Tensor, Tensor, Tensor, AttentionMetadata, float, KvScales], Tensor]

EXPANDED_PAGE_TOKENS = 64
"""Tokens of a page of expanded keys, of which each row has its own."""

EXPANDED_BYTES_MAX = 1 << 28
"""Keys and values that are expanded at once; a row with more of them is absorbed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSizes:
    """The sizes of a latent attention layer: the cache of a token, and what heads expand it to."""

    heads: int  # Q, of all ranks together; each rank has the whole cache
    latent: int  # R
    content: int  # C, the part of a key that is computed from the latent
    position: int  # O, the part of a key that is rotated and shared by all heads
    value: int  # V

    window = None  # a query attends to all tokens before it
    tensors = 1  # a layer: keys and values are the same

    @property
    def head_size(self) -> int:
        """Elements of a token in a layer, the one head of the cache."""
        return self.latent + self.position

    @property
    def wide(self) -> int:
        """Head size of expanded attention, common to keys and values."""
        return max(self.content + self.position, self.value)

    def heads_of(self, ranks: int) -> int:
        return 1

    def token_bytes(self, ranks: int, dtype: torch.dtype) -> int:
        return self.heads_of(ranks) * self.head_size * dtype.itemsize


class LatentOps(Protocol):
    """The operations that latent attention calls."""

    @property
    def paged_attention(self) -> PagedAttention: ...

    @property
    def linear_heads(self) -> Callable[[Tensor, Tensor], Tensor]: ...


class LatentHeads(Protocol):
    """The projections of a layer between latents and heads."""

    def expand(self, latents: Tensor) -> Tensor:
        """Compute contents of keys, and values: (N, R)  ->  (N, Q, C + V)."""
        ...

    def absorb(self, ops: LatentOps, content: Tensor, /) -> Tensor:
        """Project queries so that they attend to latents directly: (T, Q, C)  ->  (T, Q, R)."""
        ...

    def restore(self, ops: LatentOps, mixed: Tensor, /) -> Tensor:
        """Compute values from attended latents: (T, Q, R)  ->  (T, Q, V)."""
        ...


@dataclass(frozen=True, slots=True)
class LatentPart:
    """Rows of a pass that attend together."""

    rows: AttentionMetadata  # over the cache, or over the keys expanded for these rows alone
    tokens: Tensor | None  # (T',) indices into the pass's tokens; None: all, in order
    # (N,) slots of the latents to expand, each row's in whole pages, whose tail repeats its last
    # token; None: absorbed.
    places: Tensor | None


@dataclass(frozen=True)
class LatentMetadata:
    """The rows of a forward pass for a latent cache group. Made once a pass.

    `absorbed`: no row is expanded. The forms differ in their last bits, so this makes results
    independent of the rest of the batch.
    """

    rows: AttentionMetadata
    sizes: LatentSizes
    absorbed: bool = False

    @cached_property
    def parts(self) -> tuple[LatentPart, ...]:
        expanded = self._expanded()
        if not expanded.any():
            return (LatentPart(self.rows, None, None),)
        parts = [self._expanded_part(rows) for rows in self._batches(np.flatnonzero(expanded))]
        if not expanded.all():
            parts.append(self._absorbed_part(np.flatnonzero(~expanded)))
        return tuple(parts)

    def _expanded(self) -> NDArray[np.bool_]:
        """Which rows are cheaper expanded, in multiplications a head, and fit."""
        queries, keys = self.rows.query_len.astype(np.int64), self.rows.kv_len.astype(np.int64)
        if self.absorbed:
            return np.zeros(len(queries), np.bool_)
        sizes = self.sizes
        between = sizes.latent * (sizes.content + sizes.value)
        expanded = keys * between + queries * keys * 2 * sizes.wide
        absorbed = queries * between + queries * keys * 2 * sizes.head_size
        return (queries > 1) & (expanded < absorbed) & (keys <= self._keys_max)

    @property
    def _heads(self) -> int:
        """Query heads on this rank: all of them use the one head of the cache."""
        return self.rows.shape.queries_per_head

    @property
    def _keys_max(self) -> int:
        per_key = 2 * self._heads * self.sizes.wide * self.rows.shape.dtype.itemsize
        return EXPANDED_BYTES_MAX // per_key

    def _batches(self, chosen: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        first, keys = 0, 0
        for index, row in enumerate(chosen):
            keys += int(self.rows.kv_len[row])
            if keys > self._keys_max:
                yield chosen[first:index]
                first, keys = index, int(self.rows.kv_len[row])
        yield chosen[first:]

    def _absorbed_part(self, chosen: NDArray[np.int64]) -> LatentPart:
        rows = replace(
            self.rows,
            page_table=np.ascontiguousarray(self.rows.page_table[chosen]),
            query_len=self.rows.query_len[chosen],
            kv_len=self.rows.kv_len[chosen],
        )
        return LatentPart(rows, self._tokens(chosen), None)

    def _expanded_part(self, chosen: NDArray[np.int64]) -> LatentPart:
        """The rows over expanded keys, whose pages follow each other."""
        kv_len = self.rows.kv_len[chosen]
        pages = -(-kv_len // EXPANDED_PAGE_TOKENS)
        first = np.cumsum(pages, dtype=np.int64) - pages
        shape = KvShape(
            EXPANDED_PAGE_TOKENS, self._heads, 1, self.sizes.wide, self.rows.shape.dtype
        )
        table = np.add.outer(first, np.arange(int(pages.max()))).astype(np.int32)
        rows = AttentionMetadata(shape, table, self.rows.query_len[chosen], kv_len)
        kept = pages * EXPANDED_PAGE_TOKENS
        row = np.repeat(np.arange(len(chosen)), kept)
        position = np.arange(len(row)) - (first * EXPANDED_PAGE_TOKENS)[row]
        position = np.minimum(position, kv_len[row] - 1)
        page_tokens = self.rows.shape.page_tokens
        page = self.rows.page_table[chosen[row], position // page_tokens].astype(np.int64)
        assert (page >= 0).all(), "a row reads a token that has no page"
        places = torch.as_tensor(page * page_slots(page_tokens) + position % page_tokens)
        return LatentPart(rows, self._tokens(chosen), places)

    def _tokens(self, chosen: NDArray[np.int64]) -> Tensor | None:
        if len(chosen) == len(self.rows.query_len):
            return None
        selected = np.zeros(len(self.rows.query_len), np.bool_)
        selected[chosen] = True
        return torch.as_tensor(np.flatnonzero(np.repeat(selected, self.rows.query_len)))


@kernel("attention.latents", triton("latent:store_latents", caches=True), invariant=True)
def store_latents(
    latents: Tensor, cos: Tensor, sin: Tensor, pages: Tensor, places: Tensor, scale: float
) -> None:
    """Apply RoPE to the position parts of latents, and write all of these to the cache.

    latents (T, R + O); cos, sin (T, 1, O) from `cos_sin`; pages of latents, mutated, and their
    scale; places (T,) int64, their slots
    """
    first = latents.shape[1] - cos.shape[-1]
    plain, turned = latents[:, None, :first], latents[:, None, first:]
    rotated = torch.cat((plain, apply_rotary(turned, cos, sin)), dim=-1)
    store_keys(rotated, pages, places, scale)


def latent_attention(
    q: Tensor,
    cache: LayerKvCache,
    rows: LatentMetadata,
    heads: LatentHeads,
    scale: float,
    ops: LatentOps,
) -> Tensor:
    """Softmax attention of each query over its row's cached latents, causal.

    q (T, Q, C + O), rotated; the cache's pages of latents, which already contain those of this
    pass  ->  (T, Q, V)
    """
    out: Tensor | None = None
    for part in rows.parts:
        picked = q if part.tokens is None else q.index_select(0, part.tokens)
        mixed = _mix(picked, cache, part, (rows.sizes, heads), scale, ops)
        if part.tokens is None:
            return mixed
        if out is None:
            out = mixed.new_empty(len(q), *mixed.shape[1:])
        out.index_copy_(0, part.tokens, mixed)
    assert out is not None, "a pass has rows"
    return out


def _mix(
    q: Tensor,
    cache: LayerKvCache,
    part: LatentPart,
    layer: tuple[LatentSizes, LatentHeads],
    scale: float,
    ops: LatentOps,
) -> Tensor:
    sizes, heads = layer
    if part.places is None:
        absorbed = heads.absorb(ops, q[..., : sizes.content])  # (T, Q, R)
        queries = torch.cat((absorbed, q[..., sizes.content :]), dim=-1)
        # Values are the latents: the position part beside them is averaged too, and dropped.
        scales = KvScales(cache.scales.key, cache.scales.key)
        mixed = ops.paged_attention(queries, cache.keys, cache.keys, part.rows, scale, scales)
        return heads.restore(ops, mixed[..., : sizes.latent])
    latents = _gathered(cache, part.places, q.dtype)  # (N, R + O)
    expanded = heads.expand(latents[:, : sizes.latent])  # (N, Q, C + V)
    shared = latents[:, None, sizes.latent :].expand(-1, expanded.shape[1], -1)
    keys = torch.cat((expanded[..., : sizes.content], shared), dim=-1)
    parts = (q, keys, expanded[..., sizes.content :])
    q, keys, values = (F.pad(x, (0, sizes.wide - x.shape[-1])) for x in parts)
    mixed = ops.paged_attention(q, *_in_pages(keys, values), part.rows, scale, UNSCALED)
    return mixed[..., : sizes.value]


def _in_pages(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Pages of expanded keys and values (N, Q, wide)."""
    tokens, heads, size = keys.shape
    shape = (tokens // EXPANDED_PAGE_TOKENS, EXPANDED_PAGE_TOKENS, heads, size, keys.dtype)
    pages = keys.new_empty(key_pages_shape(*shape)), keys.new_empty(value_pages_shape(*shape))
    store_kv(keys, values, *pages, torch.arange(tokens, device=keys.device))
    return pages


def _gathered(cache: LayerKvCache, places: Tensor, dtype: torch.dtype) -> Tensor:
    numbers = read_keys(cache.keys, places).flatten(1).to(dtype)
    return numbers if cache.scales.key == 1.0 else numbers * cache.scales.key
