"""Attention by FlashInfer: a step is planned on the host, once for all layers that attend alike.

Rows of one token each are decoded; any other pass is a prefill of all its rows. Both read a plan
from the memory of a wrapper, which the wrapper copies to the device when it is planned. The device
may be steps behind, and a wrapper that is planned again would overwrite what is yet to be copied:
it belongs to the rows that it was planned for until they are dropped, and their step was read then.

Axes: R rows, T tokens, N pages of all rows, Q query heads, H kv heads, D head size.

Source: Ye et al. 2025, "FlashInfer", arXiv:2501.01005.
"""

from __future__ import annotations

import importlib
import math
import weakref
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from antiphon.kernels.flashinfer.backend import PACKAGE, prefill_kernels
from antiphon.kernels.kv import UNSCALED, KvScales

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from antiphon.kernels.attention import AttentionMetadata, KvShape
    from antiphon.kernels.flashinfer.backend import Kernels

    Ints = NDArray[np.int32]

WORKSPACE_BYTES = 128 << 20
"""For parts of rows, as FlashInfer recommends: it splits rows into as many tiles of 128 queries as
run at a time, two a processor, whose results in float32 need 17 MB with 132 processors. Releases
before its pull request 5177 took more, up to 512 MB, and raised where there were less:
https://github.com/vllm-project/vllm/issues/40023."""
PLAN_BYTES = 1 << 20
"""Of a decode: some numbers a row, or for each of two parts a processor if these are more."""


class Wrapper(Protocol):
    """A wrapper of FlashInfer, which computes what it was planned for."""

    plan: Any
    run: Any
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


class RowPages(NamedTuple):
    """Pages of rows as wrappers take them, without those that lie before the windows of a row."""

    starts: Ints  # (R + 1,) the first page of each row in `pages`
    pages: Ints  # (N,)
    last_tokens: Ints  # (R,) tokens in the last page of each row

    @classmethod
    def of(cls, rows: AttentionMetadata) -> RowPages:
        """The pages of rows.

        Raises:
            RuntimeError: A row reads or writes a token that has no page.
        """
        table, query_len, kv_len = rows.page_table, rows.query_len, rows.kv_len
        size, window = rows.shape.page_tokens, rows.shape.window
        first = np.zeros_like(kv_len)
        if window is not None:
            first = np.maximum(kv_len - query_len + 1 - window, 0) // size
        counts = -(-kv_len // size) - first
        starts = np.zeros(len(kv_len) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        row = np.repeat(np.arange(len(kv_len)), counts)
        column = np.arange(len(row)) - np.repeat(starts[:-1] - first, counts)
        inside = (column < table.shape[1]).all()
        if not inside or (pages := table[row, column]).min(initial=0) < 0:
            raise RuntimeError("a row reads or writes a token that has no page")
        return cls(starts, pages, kv_len - (first + counts - 1) * size)


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
    out = torch.empty_like(q)
    if not len(q):
        return out
    params = PlanParams(rows.shape, softcap, scale, keys.dtype, q.device)
    plan = rows.plans.get(params)
    if plan is None:
        plan = _plan(params, rows) if rows.pages_max is None else _Captured(params, rows)
        rows.plans[params] = plan
    assert isinstance(plan, _Lease | _Captured), "planned here"
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


class _Lease:
    """A wrapper that rows have until they are dropped."""

    def __init__(self, wrapper: Wrapper, free: list[Wrapper]) -> None:
        self.wrapper = wrapper
        weakref.finalize(self, free.append, wrapper)


def _plan(params: PlanParams, rows: AttentionMetadata) -> _Lease:
    """Plan the rows of one pass."""
    pages, device = RowPages.of(rows), params.device
    if (rows.query_len == 1).all():
        free = _free_wrappers(device, None)
        wrapper = free.pop() if free else _decode_wrapper(device)
        _plan_decode(wrapper, params, rows, pages)
        return _Lease(wrapper, free)
    kernels = prefill_kernels(_sm(device), params.shape.dtype, params.cache_dtype)
    free = _free_wrappers(device, kernels)
    wrapper = free.pop() if free else _prefill_wrapper(device, kernels)
    starts = np.zeros(len(rows.query_len) + 1, np.int32)
    np.cumsum(rows.query_len, out=starts[1:])
    wrapper.plan(
        qo_indptr=_on_host(starts, device),
        paged_kv_indptr=_on_host(pages.starts, device),
        paged_kv_indices=rows.upload(pages.pages),
        paged_kv_last_page_len=_on_host(pages.last_tokens, device),
        head_dim_qk=params.shape.head_size,
        head_dim_vo=params.shape.head_size,
        causal=True,
        **params.plan_arguments,
    )
    return _Lease(wrapper, free)


class _Captured:
    """A captured step: all its wrappers plan into the memory that its graph reads.

    That of steps of all sizes is the same, since a step is planned just before it is replayed.
    """

    def __init__(self, params: PlanParams, rows: AttentionMetadata) -> None:
        assert rows.pages_max is not None, "a captured step"
        self._params, size = params, len(rows.kv_len)
        counts = size + 1, size * rows.pages_max, size
        self._memory = [_graph_memory(params, place, count) for place, count in enumerate(counts)]
        self._free: list[Wrapper] = []
        self.wrapper = self._make()
        _plan_decode(self.wrapper, params, rows, RowPages.of(rows))
        rows.planners.append(self._plan_again)

    def _plan_again(self, rows: AttentionMetadata, owner: AttentionMetadata) -> None:
        wrapper = self._free.pop() if self._free else self._make()
        _plan_decode(wrapper, self._params, rows, RowPages.of(rows))
        owner.plans[self] = _Lease(wrapper, self._free)

    def _make(self) -> Wrapper:
        wrapper = _decode_wrapper(self._params.device, self._memory)
        wrapper.reset_workspace_buffer(
            float_workspace_buffer=_workspace(self._params.device),
            int_workspace_buffer=_plan_memory(self._params),
        )
        return wrapper


def _plan_decode(
    wrapper: Wrapper, params: PlanParams, rows: AttentionMetadata, pages: RowPages
) -> None:
    wrapper.plan(
        indptr=_on_host(pages.starts, params.device),
        indices=rows.upload(pages.pages),
        last_page_len=_on_host(pages.last_tokens, params.device),
        head_dim=params.shape.head_size,
        **params.plan_arguments,
    )


def _decode_wrapper(device: torch.device, memory: list[Tensor] | None = None) -> Wrapper:
    """A wrapper of decodes; of captured ones with this memory of starts, pages and last tokens."""
    starts, pages, last_tokens = memory or (None, None, None)
    return importlib.import_module(PACKAGE).BatchDecodeWithPagedKVCacheWrapper(
        float_workspace_buffer=_workspace(device),
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
        float_workspace_buffer=_workspace(device), kv_layout="HND", backend=kernels
    )


def _on_host(values: Ints, device: torch.device) -> Tensor:
    """An array that a wrapper reads now, and the device copies while the host goes on."""
    tensor = torch.as_tensor(values)
    return tensor.pin_memory() if device.type == "cuda" else tensor


@cache
def _free_wrappers(device: torch.device, prefills: Kernels | None) -> list[Wrapper]:
    """Wrappers that no rows have: of prefills by these kernels, or of decodes."""
    return []


@cache
def _workspace(device: torch.device) -> Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


_GRAPH_MEMORY: dict[tuple[PlanParams, int], Tensor] = {}


def _graph_memory(params: PlanParams, place: int, count: int) -> Tensor:
    """The first numbers of those that graphs of all sizes read; a larger graph gets others."""
    found = _GRAPH_MEMORY.get((params, place))
    if found is None or len(found) < count:
        found = torch.zeros(count, dtype=torch.int32, device=params.device)
        _GRAPH_MEMORY[params, place] = found
    return found[:count]


@cache
def _plan_memory(params: PlanParams) -> Tensor:
    """What graphs of all sizes read of the plan of the step that is replayed."""
    return torch.zeros(PLAN_BYTES, dtype=torch.uint8, device=params.device)


@cache
def _sm(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
