"""Stands for FlashInfer: attention by torch, from the arguments of `plan` and `run` alone.

What is called here has the names that FlashInfer's own signatures have, as a test compares. And as
there, a plan is made of arrays of the host in memory of the wrapper, which the device copies when
it gets there; a run reads the copy; a captured run reads the memory that its wrapper was made with;
what is launched is one operation for torch; and log-sum-exp has base 2.

Axes: R rows, T tokens, N pages of all rows, Q query heads, H kv heads, D head size.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

PLAN_INTS = 1 << 12
_LAYOUTS = ("NHD", "HND")
_LIBRARY = torch.library.Library("flashinfer_stand_in", "DEF")


class _Wrapper:
    """What both wrappers of pages have in common."""

    def __init__(self, workspace: Tensor, kv_layout: str, memory: list[Tensor] | None) -> None:
        assert workspace.dtype == torch.uint8
        assert kv_layout in _LAYOUTS
        self._layout = kv_layout
        self._captured = memory  # starts, pages, tokens in last pages
        self._pinned = np.zeros(PLAN_INTS, np.int32)  # which the device reads later
        self._schedule = torch.zeros(PLAN_INTS, dtype=torch.int32)

    def reset_workspace_buffer(
        self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor
    ) -> None:
        assert float_workspace_buffer.dtype == int_workspace_buffer.dtype == torch.uint8
        self._schedule = int_workspace_buffer.view(torch.int32)

    def _plan(
        self, query_starts: Any, starts: Any, pages: Tensor, last_tokens: Any, facts: dict[str, Any]
    ) -> None:
        """Plan rows, of arrays of the host but for their pages."""
        rows = len(last_tokens)
        assert len(starts) == len(query_starts) == rows + 1, "offsets of all rows"
        counts = starts[1:] - starts[:-1]
        assert starts[0] == query_starts[0] == 0
        assert (counts > 0).all(), "each row has pages"
        assert starts[-1] == len(pages), "of all rows, and of no other"
        assert (last_tokens > 0).all()
        assert (last_tokens <= facts["page_size"]).all(), "tokens in a page"
        assert facts["num_qo_heads"] % facts["num_kv_heads"] == 0
        assert facts["pos_encoding_mode"] == "NONE"
        assert pages.dtype == torch.int32
        planned = np.concatenate((query_starts, starts, last_tokens, counts))
        self._pinned[: len(planned)] = planned
        ends = 0, rows + 1, 2 * rows + 2, 3 * rows + 2, 4 * rows + 2
        memory = torch.from_numpy(self._pinned)
        pinned = [memory[start:end] for start, end in pairwise(ends)]
        with torch.inference_mode():  # in which a worker may have made it
            schedule = self._schedule[:rows].copy_(pinned.pop())
        if self._captured is None:
            queries, known_starts, last = (torch.empty_like(part).copy_(part) for part in pinned)
            self._read = queries, known_starts, pages, last, schedule
        else:
            known_starts, known_pages, last = self._captured
            assert len(last) == rows, "a graph has as many rows as it had"
            assert len(pages) <= len(known_pages)
            known_starts.copy_(pinned[1])
            known_pages[: len(pages)].copy_(pages)
            last.copy_(pinned[2])
            queries = torch.from_numpy(np.arange(rows + 1, dtype=np.int32))
            self._read = queries, known_starts, known_pages, last, schedule
        self._rows, self._facts = rows, facts

    def _run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        k_scale: float | None,
        v_scale: float | None,
        out: Tensor | None,
        *,
        return_lse: bool,
        causal: bool,
    ) -> Any:
        facts, keys, values = self._facts, *paged_kv_cache
        heads, page = (1, 2) if self._layout == "HND" else (2, 1)
        assert keys.shape[page] == facts["page_size"]
        assert keys.shape[heads] == facts["num_kv_heads"]
        assert q.shape[1] == facts["num_qo_heads"]
        assert q.shape[2] == keys.shape[3] == facts["head_dim"]
        assert q.dtype == facts["q_data_type"]
        assert keys.dtype == values.dtype == facts["kv_data_type"]
        assert keys.stride() == values.stride(), "else another module computes it"
        scale = facts["sm_scale"] * (1.0 if k_scale is None else k_scale)
        if out is None:
            out = torch.empty_like(q, dtype=facts["o_data_type"])
        lse = torch.empty(q.shape[:2], dtype=torch.float32)
        torch.ops.flashinfer_stand_in.attend(
            *(out, lse, q, keys, values, *self._read),
            *(page, causal, facts["window_left"], facts["logits_soft_cap"] or 0.0, scale),
        )
        if v_scale is not None and v_scale != 1.0:
            out *= v_scale
        return (out, lse) if return_lse else out


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        *,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        memory = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        given = [part for part in memory if part is not None]
        assert len(given) == (3 if use_cuda_graph else 0)
        assert backend == "fa2", "others compile or download what they need"
        assert use_tensor_cores, "else another module computes it"
        super().__init__(float_workspace_buffer, kv_layout, given or None)

    def plan(
        self,
        *,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        o_data_type: torch.dtype | None = None,
        sm_scale: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        facts, starts = dict(locals()), ints(indptr)
        self._plan(np.arange(len(starts)), starts, indices, ints(last_page_len), facts)

    def run(
        self,
        *,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        assert len(q) == self._rows, "one token of each row"
        given = q, paged_kv_cache, k_scale, v_scale, out
        return self._run(*given, return_lse=return_lse, causal=False)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self, *, float_workspace_buffer: Tensor, kv_layout: str = "NHD", backend: str = "auto"
    ) -> None:
        assert backend in ("fa2", "fa3"), "others compile or download what they need"
        super().__init__(float_workspace_buffer, kv_layout, None)

    def plan(
        self,
        *,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        o_data_type: torch.dtype | None = None,
        non_blocking: bool = True,
    ) -> None:
        facts = {**locals(), "head_dim": head_dim_qk}
        assert head_dim_vo in (None, head_dim_qk)
        offsets, last_tokens = ints(qo_indptr), ints(paged_kv_last_page_len)
        self._plan(offsets, ints(paged_kv_indptr), paged_kv_indices, last_tokens, facts)
        self._tokens = int(offsets[-1])

    def run(
        self,
        *,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        assert len(q) == self._tokens, "the tokens of all rows"
        given = q, paged_kv_cache, k_scale, v_scale, out
        return self._run(*given, return_lse=return_lse, causal=self._facts["causal"])


def ints(tensor: Tensor) -> Any:
    """Read a tensor of the host while a step is launched, as FlashInfer does."""
    with torch._C.DisableTorchFunction():
        values = tensor.numpy()
    assert values.dtype == np.int32
    assert values.ndim == 1
    return values


def _attend(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    query_starts: Tensor,
    starts: Tensor,
    pages: Tensor,
    last_tokens: Tensor,
    schedule: Tensor,
    page_axis: int,
    causal: bool,
    window_left: int,
    soft_cap: float,
    scale: float,
) -> None:
    assert torch.equal(schedule, starts[1:] - starts[:-1]), "a schedule of other rows"
    for row, last in enumerate(last_tokens.tolist()):
        tokens = slice(*query_starts[row : row + 2].tolist())
        own = pages[slice(*starts[row : row + 2].tolist())].long()
        k, v = (_read(cached, own, page_axis, last) for cached in (keys, values))
        count, heads, size = q[tokens].shape
        queries = q[tokens].float().view(count, k.shape[1], -1, size)  # (T, H, Q / H, D)
        scores = torch.einsum("thgd,nhd->thgn", queries, k) * scale
        if soft_cap > 0:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        key = torch.arange(len(k))
        position = len(k) - count + torch.arange(count)[:, None]
        seen = torch.ones(count, len(k), dtype=torch.bool)
        if causal:
            seen &= key <= position
        if window_left >= 0:
            seen &= key >= position - window_left
        scores = scores.masked_fill(~seen[:, None, None], -math.inf)
        v[~seen.any(dim=0)] = 0  # of which nothing is known
        mixed = torch.einsum("thgn,nhd->thgd", scores.softmax(dim=-1), v)
        out[tokens] = mixed.flatten(1, 2).to(out.dtype)
        lse[tokens] = scores.logsumexp(dim=-1).reshape(count, heads) / math.log(2)


def _read(cached: Tensor, pages: Tensor, page_axis: int, last: int) -> Tensor:
    """The cached tokens of a row, (N, H, D) float32."""
    found = (cached.view(torch.uint8) if cached.itemsize == 1 else cached)[pages]
    if page_axis == 2:
        found = found.transpose(1, 2)
    tokens = found.reshape(-1, *found.shape[2:]).view(cached.dtype)
    unused = cached.shape[page_axis] - last
    return tokens[: len(tokens) - unused].float()


_LIBRARY.define(
    "attend(Tensor(a!) out, Tensor(b!) lse, Tensor q, Tensor keys, Tensor values, "
    "Tensor query_starts, Tensor starts, Tensor pages, Tensor last_tokens, Tensor schedule, "
    "int page_axis, "
    "bool causal, int window_left, float soft_cap, float scale) -> ()"
)
_LIBRARY.impl("attend", _attend, "CPU")
_LIBRARY.impl("attend", lambda *_: None, "Meta")
