"""Attention over latents by FlashInfer: rows of any number of tokens have one wrapper.

A latent lies in its page before the part of a key that RoPE rotates, and so do the two parts of a
query: the wrapper takes both as they are. It computes no more than values, which are latents.

Axes: T tokens, Q query heads, P pages, S tokens a page, D elements of a latent with its rotated
part, R those of the latent.

Source: DeepSeek-AI 2024, arXiv:2405.04434, section 2.1.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from antiphon.kernels.flashinfer.backend import PACKAGE, prefill_kernels
from antiphon.kernels.flashinfer.plans import (
    RowPages,
    WrapperLease,
    free_wrappers,
    graph_memory,
    on_host,
    row_starts,
    sm_of,
    workspace,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import Tensor

    from antiphon.kernels.attention import AttentionMetadata, KvShape
    from antiphon.kernels.flashinfer.backend import Kernels
    from antiphon.kernels.flashinfer.plans import Wrapper

MODULE = f"{PACKAGE}.mla"
PLAN_QUERIES = 1 << 20
"""Queries of all heads in a plan, which has room for 16,384 pieces of work and refuses more: tiles
of 128 queries, or of 64 where rows have no more, and parts of those with many keys."""


@dataclass(frozen=True, slots=True)
class LatentParams:
    """What layers have in common whose attention is planned once."""

    shape: KvShape
    scale: float
    device: torch.device

    @property
    def kernels(self) -> Kernels:
        return prefill_kernels(sm_of(self.device), self.shape.dtype, self.shape.dtype)


class PlannedPart(NamedTuple):
    """Tokens of a pass, and the wrapper that was planned for them."""

    tokens: slice
    plan: WrapperLease | _CapturedLatents


class LatentPlan(NamedTuple):
    """A pass in as many parts as there are plans."""

    parts: tuple[PlannedPart, ...]


def latent_attention(q: Tensor, pages: Tensor, rows: AttentionMetadata, scale: float) -> Tensor:
    """Attention of each query over its row's latents, causal.

    q (T, Q, D) contiguous; pages (P, 1, S, D) in 16 bits  ->  (T, Q, R)
    """
    shape = rows.shape
    assert shape.latent is not None, "pages of latents"
    out = q.new_empty((*q.shape[:2], shape.latent))
    if not len(q):
        return out
    params = LatentParams(shape, scale, q.device)
    plan = rows.plans.get(params)
    if plan is None:
        rows.plans[params] = plan = LatentPlan(tuple(_plan(params, rows)))
    assert isinstance(plan, LatentPlan), "planned here"
    for tokens, part in plan.parts:
        part.wrapper.run(
            query=q[tokens], kv_cache=pages[:, 0, : shape.page_tokens], out=out[tokens]
        )
    return out


def _plan(params: LatentParams, rows: AttentionMetadata) -> Iterator[PlannedPart]:
    """Plan the rows of one pass, or of a captured step."""
    if rows.pages_max is not None:
        yield PlannedPart(slice(None), _CapturedLatents(params, rows))
        return
    free = free_wrappers(params.device, (MODULE, params.kernels))
    for tokens, part in _parts(rows):
        wrapper = free.pop() if free else _wrapper(params)
        _plan_rows(wrapper, params, part)
        yield PlannedPart(tokens, WrapperLease(wrapper, free))


def _parts(rows: AttentionMetadata) -> Iterator[tuple[slice, AttentionMetadata]]:
    """Rows, or pieces of them, for which a plan has room, and their tokens in the pass."""
    ends = np.cumsum(rows.query_len, dtype=np.int32)
    tokens, most = int(ends[-1]), PLAN_QUERIES // rows.shape.queries_per_head
    if tokens <= most:
        yield slice(None), rows
        return
    for first in range(0, tokens, most):
        last = np.minimum(ends, first + most)
        count = last - np.maximum(ends - rows.query_len, first)
        there = count > 0
        yield (
            slice(first, first + most),
            replace(
                rows,
                page_table=rows.page_table[there],
                query_len=count[there],
                kv_len=(rows.kv_len - ends + last)[there],
            ),
        )


class _CapturedLatents:
    """A captured step, whose graph reads its pages from memory that steps of all sizes share.

    A wrapper of latents takes no other memory for its plan, and the one that was captured is
    planned again: what it copies a plan from, it allocates anew each time.
    """

    def __init__(self, params: LatentParams, rows: AttentionMetadata) -> None:
        assert rows.pages_max is not None, "a captured step"
        self._params, size = params, len(rows.kv_len)
        counts = size + 1, size + 1, size * rows.pages_max, size
        memory = [
            graph_memory(params, place, count, params.device) for place, count in enumerate(counts)
        ]
        self.wrapper = _wrapper(params, memory)
        _plan_rows(self.wrapper, params, rows)
        rows.planners.append(self._plan_again)

    def _plan_again(self, rows: AttentionMetadata, owner: AttentionMetadata) -> None:
        _plan_rows(self.wrapper, self._params, rows)


def _plan_rows(wrapper: Wrapper, params: LatentParams, rows: AttentionMetadata) -> None:
    pages, shape, device = RowPages.of(rows), params.shape, params.device
    assert shape.latent is not None, "pages of latents"
    metadata = importlib.import_module(MODULE).MLAPlanMetadata.csr(
        qo_indptr=on_host(row_starts(rows.query_len), device),
        kv_indptr=on_host(pages.starts, device),
        kv_indices=on_host(pages.pages, device),  # of which it reads the least and the greatest
        kv_len_arr=on_host(rows.kv_len.copy(), device),
    )
    wrapper.plan(
        metadata=metadata,
        num_heads=shape.queries_per_head,
        head_dim_ckv=shape.latent,
        head_dim_kpe=shape.head_size - shape.latent,
        page_size=shape.page_tokens,
        causal=bool((rows.query_len > 1).any()),
        sm_scale=params.scale,
        q_data_type=shape.dtype,
        kv_data_type=shape.dtype,
    )


def _wrapper(params: LatentParams, memory: list[Tensor] | None = None) -> Wrapper:
    """A wrapper; of captured steps with this memory of offsets, pages and lengths."""
    queries, starts, pages, lengths = memory or (None, None, None, None)
    return importlib.import_module(MODULE).BatchMLAPagedAttentionWrapper(
        float_workspace_buffer=workspace(params.device),
        use_cuda_graph=memory is not None,
        qo_indptr=queries,
        kv_indptr=starts,
        kv_indices=pages,
        kv_len_arr=lengths,
        backend=params.kernels,
    )
