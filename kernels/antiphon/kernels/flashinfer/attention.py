"""Attention by FlashInfer: a step is planned on the host, once for all layers that attend alike.

Rows of one token each are decoded; any other pass is a prefill of all its rows. Latents have a
wrapper of their own.

Axes: R rows, T tokens, Q query heads, H kv heads, D head size.

Source: Ye et al. 2025, "FlashInfer", arXiv:2501.01005.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import torch

from antiphon.kernels.flashinfer.backend import PACKAGE, prefill_kernels
from antiphon.kernels.flashinfer.latents import latent_attention
from antiphon.kernels.flashinfer.plans import (
    RowPages,
    Wrapper,
    WrapperLease,
    free_wrappers,
    graph_memory,
    on_host,
    row_starts,
    sm_of,
    workspace,
)
from antiphon.kernels.kv import UNSCALED, KvScales

if TYPE_CHECKING:
    from torch import Tensor

    from antiphon.kernels.attention import AttentionMetadata, KvShape
    from antiphon.kernels.flashinfer.backend import Kernels

PLAN_BYTES = 1 << 20
"""Of a decode: some numbers a row, or for each of two parts a processor if these are more."""


class PagedWrapper(Wrapper, Protocol):
    """A wrapper of pages of keys and values, whose memory may be another."""

    reset_workspace_buffer: Any


@dataclass(frozen=True, slots=True)
class PlanParams:
    """What layers have in common whose attention is planned once."""

    shape: KvShape
    softcap: float | None
    scale: float
    cache_dtype: torch.dtype
    device: torch.device

    @property
    def plan_arguments(self) -> dict[str, object]:
        """What both wrappers take."""
        shape = self.shape
        return {
            "num_qo_heads": shape.heads * shape.queries_per_head,
            "num_kv_heads": shape.heads,
            "page_size": shape.page_tokens,
            "pos_encoding_mode": "NONE",
            # Of tokens before the query itself.
            "window_left": -1 if shape.window is None else shape.window - 1,
            "logits_soft_cap": self.softcap,
            "q_data_type": shape.dtype,
            "kv_data_type": self.cache_dtype,
            "o_data_type": shape.dtype,
            "sm_scale": self.scale,
            "non_blocking": True,
        }


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: AttentionMetadata,
    scale: float,
    scales: KvScales = UNSCALED,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As `antiphon.kernels.attention.paged_attention`, for pages of rows."""
    q = q.contiguous()
    if keys is values:
        return latent_attention(q, keys, rows, scale)
    out = torch.empty_like(q)
    if not len(q):
        return out
    params = PlanParams(rows.shape, softcap, scale, keys.dtype, q.device)
    plan = rows.plans.get(params)
    if plan is None:
        plan = _plan(params, rows) if rows.pages_max is None else _Captured(params, rows)
        rows.plans[params] = plan
    assert isinstance(plan, WrapperLease | _Captured), "planned here"
    size = rows.shape.page_tokens
    made = plan.wrapper.run(
        q=q,
        paged_kv_cache=(keys[:, :, :size], values[:, :, :size]),
        k_scale=float(scales.key),
        v_scale=float(scales.value),
        out=out,
        return_lse=sinks is not None,
    )
    if sinks is None:
        return out
    # A sink is one more score, without a value: it takes its share of what the others have.
    mass = made[1] * math.log(2)  # (T, Q), from base 2
    share = torch.sigmoid(mass - sinks.float()).unsqueeze(-1)
    return (out * share).to(out.dtype)


def _plan(params: PlanParams, rows: AttentionMetadata) -> WrapperLease:
    """Plan the rows of one pass."""
    pages, device = RowPages.of(rows), params.device
    if (rows.query_len == 1).all():
        free = free_wrappers(device, None)
        wrapper = free.pop() if free else _decode_wrapper(device)
        _plan_decode(wrapper, params, rows, pages)
        return WrapperLease(wrapper, free)
    kernels = prefill_kernels(sm_of(device), params.shape.dtype, params.cache_dtype)
    free = free_wrappers(device, kernels)
    wrapper = free.pop() if free else _prefill_wrapper(device, kernels)
    wrapper.plan(
        qo_indptr=on_host(row_starts(rows.query_len), device),
        paged_kv_indptr=on_host(pages.starts, device),
        paged_kv_indices=rows.upload(pages.pages),
        paged_kv_last_page_len=on_host(pages.last_tokens, device),
        head_dim_qk=params.shape.head_size,
        head_dim_vo=params.shape.head_size,
        causal=True,
        **params.plan_arguments,
    )
    return WrapperLease(wrapper, free)


class _Captured:
    """A captured step: all its wrappers plan into the memory that its graph reads.

    That of steps of all sizes is the same, since a step is planned just before it is replayed.
    """

    def __init__(self, params: PlanParams, rows: AttentionMetadata) -> None:
        assert rows.pages_max is not None, "a captured step"
        self._params, size = params, len(rows.kv_len)
        counts = size + 1, size * rows.pages_max, size
        self._memory = [
            graph_memory(params, place, count, params.device) for place, count in enumerate(counts)
        ]
        self._free: list[Wrapper] = []
        self.wrapper = self._make()
        _plan_decode(self.wrapper, params, rows, RowPages.of(rows))
        rows.planners.append(self._plan_again)

    def _plan_again(self, rows: AttentionMetadata, owner: AttentionMetadata) -> None:
        wrapper = self._free.pop() if self._free else self._make()
        _plan_decode(wrapper, self._params, rows, RowPages.of(rows))
        owner.plans[self] = WrapperLease(wrapper, self._free)

    def _make(self) -> Wrapper:
        wrapper = _decode_wrapper(self._params.device, self._memory)
        wrapper.reset_workspace_buffer(
            float_workspace_buffer=workspace(self._params.device),
            int_workspace_buffer=_plan_memory(self._params),
        )
        return wrapper


def _plan_decode(
    wrapper: Wrapper, params: PlanParams, rows: AttentionMetadata, pages: RowPages
) -> None:
    wrapper.plan(
        indptr=on_host(pages.starts, params.device),
        indices=rows.upload(pages.pages),
        last_page_len=on_host(pages.last_tokens, params.device),
        head_dim=params.shape.head_size,
        **params.plan_arguments,
    )


def _decode_wrapper(device: torch.device, memory: list[Tensor] | None = None) -> PagedWrapper:
    """A wrapper of decodes; of captured ones with this memory of starts, pages and last tokens."""
    starts, pages, last_tokens = memory or (None, None, None)
    return importlib.import_module(PACKAGE).BatchDecodeWithPagedKVCacheWrapper(
        float_workspace_buffer=workspace(device),
        kv_layout="HND",
        use_cuda_graph=memory is not None,
        # The matrix units multiply all query heads of a kv head together, however many they are.
        use_tensor_cores=True,
        paged_kv_indptr_buffer=starts,
        paged_kv_indices_buffer=pages,
        paged_kv_last_page_len_buffer=last_tokens,
        backend="fa2",
    )


def _prefill_wrapper(device: torch.device, kernels: Kernels) -> Wrapper:
    return importlib.import_module(PACKAGE).BatchPrefillWithPagedKVCacheWrapper(
        float_workspace_buffer=workspace(device), kv_layout="HND", backend=kernels
    )


@cache
def _plan_memory(params: PlanParams) -> Tensor:
    """What graphs of all sizes read of the plan of the step that is replayed."""
    return torch.zeros(PLAN_BYTES, dtype=torch.uint8, device=params.device)
