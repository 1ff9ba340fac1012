"""Stands for FlashInfer's latent attention: see the package.

Unlike others its wrapper takes no memory for a plan: a captured run reads that of the wrapper that
was captured, and its pages from the memory that this was made with. What a plan is copied from is
allocated for it. Where pages lie is read while a step is planned.

Axes: R rows, T tokens, P pages, S tokens a page, Q query heads, D elements of a latent with its
rotated part.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from flashinfer import PLAN_INTS, ints


@dataclass(frozen=True)
class MLAPlanMetadata:
    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_len_arr: Tensor

    @classmethod
    def csr(
        cls, *, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_len_arr: Tensor
    ) -> MLAPlanMetadata:
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)


class BatchMLAPagedAttentionWrapper:
    def __init__(
        self,
        *,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        memory = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        given = [part for part in memory if part is not None]
        assert len(given) == (4 if use_cuda_graph else 0)
        assert backend in ("fa2", "fa3"), "others take other metadata, or are downloaded"
        assert float_workspace_buffer.dtype == torch.uint8
        self._captured = given
        self._live = torch.zeros(PLAN_INTS, dtype=torch.int32)

    def plan(
        self,
        *,
        metadata: MLAPlanMetadata,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        self._facts = dict(locals())
        lengths, pages = ints(metadata.kv_len_arr), metadata.kv_indices
        query_starts, starts = ints(metadata.qo_indptr), ints(metadata.kv_indptr)
        rows, counts = len(lengths), starts[1:] - starts[:-1]
        assert len(starts) == len(query_starts) == rows + 1, "offsets of all rows"
        assert starts[0] == query_starts[0] == 0
        assert (lengths > 0).all()
        assert (counts == -(-lengths // page_size)).all(), "each row has the pages that it needs"
        assert starts[-1] == len(pages), "of all rows, and of no other"
        assert q_data_type == kv_data_type
        assert not causal or 128 % num_heads == 0, "it would leave out keys at the end of a tile"
        planned = np.concatenate((query_starts, starts, (lengths - 1) % page_size + 1, counts))
        with torch.inference_mode():  # in which a worker may have made it
            live = self._live[: len(planned)].copy_(torch.from_numpy(planned))
        if self._captured:
            known = self._captured[2]
            sizes = [len(part) for part in (query_starts, starts, lengths)]
            assert [len(self._captured[place]) for place in (0, 1, 3)] == sizes, "as it was made"
            assert len(pages) <= len(known)
            known[: len(pages)].copy_(pages)
            pages = known
        ends = 0, rows + 1, 2 * rows + 2, 3 * rows + 2, 4 * rows + 2
        queries, known_starts, last, schedule = (live[i:j] for i, j in pairwise(ends))
        self._read = queries, known_starts, pages, last, schedule
        self._tokens, self._last_page = int(query_starts[-1]), int(ints(metadata.kv_indices).max())

    def run(self, *, query: Tensor, kv_cache: Tensor, out: Tensor | None = None) -> Tensor:
        """query (T, Q, D); kv_cache (P, S, D)."""
        facts = self._facts
        latent, heads = facts["head_dim_ckv"], facts["num_heads"]
        size = latent + facts["head_dim_kpe"]
        assert query.shape == (self._tokens, heads, size), "the tokens of all rows"
        assert kv_cache.shape[1:] == (facts["page_size"], size)
        assert kv_cache.shape[0] > self._last_page
        assert query.dtype == facts["q_data_type"]
        assert kv_cache.dtype == facts["kv_data_type"]
        assert query.stride(2) == kv_cache.stride(2) == 1, "it is read as it lies there"
        if out is None:
            out = query.new_empty((self._tokens, heads, latent))
        assert out.shape == (self._tokens, heads, latent)
        lse = torch.empty(query.shape[:2], dtype=torch.float32)
        keys = kv_cache[:, None]
        torch.ops.flashinfer_stand_in.attend(
            *(out, lse, query, keys, keys[..., :latent], *self._read),
            *(2, facts["causal"], -1, 0.0, facts["sm_scale"]),
        )
        return out
