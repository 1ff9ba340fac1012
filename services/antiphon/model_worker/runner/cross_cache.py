"""The cross-attention cache of a runner: keys and values of what each request attends to.

It is a cache group whose pages belong to slots: a slot has as many as the other sequence needs, for
ever, in an order that its number gives. So nothing allocates, shares or frees them, and a plan that
starts a request in a slot overwrites all that the request before has left there. Plans run in
order: those of the request before have read it by then.

Axes: T tokens of a pass, N sequences that come with it, S tokens of each, H heads, D head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from antiphon.kernels.attention import AttentionMetadata, KvShape
from antiphon.kernels.kv import UNSCALED, page_slots, store_kv
from antiphon.model_worker.runner.pools import KvPool, cross_group

if TYPE_CHECKING:
    from torch import Tensor

    from antiphon.kernels.ops import Ops
    from antiphon.layers.cross_attention import CrossAttentionSpec
    from antiphon.model_worker.batching.plan import Ints, Longs, StepPlan
    from antiphon.model_worker.model.load import LoadedModel


class CrossCache:
    """The cache of all slots of one rank."""

    def __init__(
        self, model: LoadedModel, spec: CrossAttentionSpec, *, page_tokens: int, slots: int
    ) -> None:
        build = model.build
        self.group = cross_group(
            spec.cache, model.spec, build, page_tokens=page_tokens, slots=slots
        )
        pool = KvPool(self.group, spec.cache, build)
        self.layers = {layer: pool.layer(place) for place, layer in enumerate(self.group.layers)}
        self._tokens, self._dtype = spec.source_tokens, build.dtype
        self._shape = KvShape(
            page_tokens=page_tokens,
            heads=spec.cache.heads_of(build.of_mixers.tp.ranks),
            queries_per_head=1,
            head_size=spec.head_size,
            dtype=build.dtype,
        )
        pages = self.group.pages_total // slots
        self._tables = np.arange(slots * pages, dtype=np.int32).reshape(slots, pages)

    def of(self, ops: Ops, plan: StepPlan, token_row: Longs) -> CrossPass:
        """What a pass attends to; token_row (T,) is the row of each token."""
        sources, slots = None, None
        if plan.sources is not None and plan.source_slots is not None:
            sources = torch.as_tensor(plan.sources).to(self._dtype).flatten(0, 1)
            slots = torch.as_tensor(self._places(plan.source_slots))
        tables = self._tables[plan.slot[token_row]]
        return CrossPass(self, ops, self._rows(tables), sources, slots)

    def _rows(self, tables: Ints) -> AttentionMetadata:
        """A row for each token, which attends to all of its sequence: (T, pages) its pages.

        So a token has the same bits in a prefill as in a decode.
        """
        count = len(tables)
        lengths = np.full(count, self._tokens, np.int32)
        return AttentionMetadata(self._shape, tables, np.ones(count, np.int32), lengths)

    def _places(self, slots: Ints) -> Longs:
        """Where the sequences of these slots (N,) are stored, (N * S,)."""
        size, at = self._shape.page_tokens, np.arange(self._tokens)
        pages = self._tables[slots][:, at // size].astype(np.int64)  # (N, S)
        return (pages * page_slots(size) + at % size).ravel()


class CrossPass:
    """A `CrossAttentionBackend` of one pass. `slots` (N * S,) are those that sources are stored at.

    Attributes:
        sources: (N * S, hidden), in the dtype of the model.
    """

    def __init__(
        self,
        cache: CrossCache,
        ops: Ops,
        rows: AttentionMetadata,
        sources: Tensor | None,
        slots: Tensor | None,
    ) -> None:
        self.sources = sources
        self._cache, self._ops, self._rows, self._slots = cache, ops, rows, slots

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        assert self._slots is not None, "sequences come with this pass"
        store_kv(keys, values, *self._cache.layers[layer], self._slots)

    def attend(self, layer: int, queries: Tensor, scale: float) -> Tensor:
        keys, values = self._cache.layers[layer]
        return self._ops.paged_attention(
            queries, keys, values, self._rows, scale, UNSCALED, None, None
        )
