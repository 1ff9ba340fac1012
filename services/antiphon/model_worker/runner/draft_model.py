"""The draft model of speculative decoding: a small model with pages of its own.

Axes: R rows, T tokens of all rows, L drafts of a pass, N pages of the longest row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from antiphon.kernels.op import BackendChoice, DeviceCapability
from antiphon.kernels.ops import select
from antiphon.model_worker.batching.plan import SamplingColumns, StepPlan
from antiphon.model_worker.model.errors import ModelLoadError
from antiphon.model_worker.model.spec import HeadSpec
from antiphon.model_worker.runner.context import ForwardContexts
from antiphon.model_worker.runner.input_batch import InputBatch
from antiphon.model_worker.runner.pools import KvPool, attention_of, draft_group, kv_shape

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from antiphon.model_worker.batching.plan import Ints
    from antiphon.model_worker.model.load import LoadedModel

NO_DRAFT = -1
"""Where a row has no draft token, or no more."""
_GREEDY = SamplingColumns.zeros(0)
"""A pass takes the argmax of all its logits, and no row has parameters."""


class DraftModel:
    """Drafts the likeliest continuations of rows, token by token. Not thread-safe.

    It computes the same bits for a row whatever else is in the pass where its kernels do: the text
    that is verified does not depend on them.

    Raises:
        ModelLoadError: The model cannot draft: it has no logits, or layers that do not cache keys
            and values of the whole context.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        page_tokens: int,
        pages: int,
        forced: dict[str, str] | None = None,
        fused: bool = True,
    ) -> None:
        spec, build = model.spec, model.build
        if not isinstance(spec.head, HeadSpec):
            raise ModelLoadError("a draft model must generate text")
        self.group = draft_group(spec, build, page_tokens=page_tokens, pages=pages)
        attends = attention_of(spec, self.group)
        self.ops = select(DeviceCapability(build.device.type, build.dtype), forced)
        self.pool = KvPool(self.group, attends[1], build)
        self._shapes = (kv_shape(model, self.group, *attends),)
        self._contexts = ForwardContexts(model, self.ops, (self.pool,), fused=fused)

    @property
    def choices(self) -> tuple[BackendChoice[..., object], ...]:
        """The backend that each operation uses here, and why."""
        return (self._contexts.choice, *self.ops.choices)

    def draft(
        self, tokens: Ints, query_len: Ints, kv_len: Ints, page_table: Ints, counts: Ints
    ) -> Ints:
        """Read tokens of rows into their pages, and draft what follows them.

        tokens (T,) ids of all rows, one row after the other; query_len (R,) tokens of a row, at
        least one; kv_len (R,) its tokens in the cache with these; page_table (R, N), for at least
        `kv_len + counts - 1` tokens of a row with drafts; counts (R,) how many drafts a row gets,
        0: it is only read  ->  drafts (R, max(counts)), -1 beyond a row's count

        The last draft is not read into the pages. A row that is not finite has no drafts from
        there on, and what the pass wrote of it is zeroed.

        Raises:
            IndexError: A token is out of range.
            RuntimeError: A row reads or writes a token that has no page.
        """
        drafts = np.full((len(counts), counts.max(initial=0)), NO_DRAFT, np.int32)
        if not len(counts):
            return drafts
        rows = np.flatnonzero(counts)
        ends = np.cumsum(query_len, dtype=np.int32)
        plan = _plan(tokens, query_len, ends, kv_len, page_table, ends[rows] - 1)
        found = self._run(plan)
        for number in range(drafts.shape[1]):
            drafts[rows, number] = found
            going = (counts[rows] > number + 1) & (found != NO_DRAFT)
            if not np.count_nonzero(going):
                break
            rows, tokens = rows[going], found[going]
            ends = np.arange(1, len(rows) + 1, dtype=np.int32)
            one_each = np.ones(len(rows), np.int32)
            longer = kv_len[rows] + np.int32(number + 1)
            plan = _plan(tokens, one_each, ends, longer, page_table[rows], ends - 1)
            found = self._run(plan)
        return drafts

    def _run(self, plan: StepPlan) -> Ints:
        """The argmax of the logits of a pass, (L,); -1 for a row that is not finite."""
        batch = InputBatch(plan, self._shapes, 0)
        try:
            scored = self._contexts.score(plan, batch, plan.tokens, bare=True)
            if scored is None:
                with torch.inference_mode():
                    scored = self._contexts.score_by_layer(plan, batch, plan.tokens)
                    found = self.ops.argmax(scored.logits).numpy().astype(np.int32)
            else:
                assert scored.argmax is not None, "one call computes it"
                found = scored.argmax
        except Exception:
            self._contexts.forget()
            self._wipe(batch, np.ones(len(plan.slot), np.bool_))
            raise
        failed = batch.failed_rows(scored.finite, scored.logits_finite)
        if failed is None:
            return found
        self._wipe(batch, failed)
        return np.where(failed[batch.logit_row], np.int32(NO_DRAFT), found)

    def _wipe(self, batch: InputBatch, failed: NDArray[np.bool_]) -> None:
        """Zero what failed rows wrote in a pass: a NaN would get through the mask of attention."""
        wiped = torch.as_tensor(np.flatnonzero(failed[batch.token_row]))
        self.pool.zero(batch.groups[0].slot_mapping[wiped])


def _plan(
    tokens: Ints, query_len: Ints, ends: Ints, kv_len: Ints, page_table: Ints, logit_tokens: Ints
) -> StepPlan:
    """A pass over rows, which end in `tokens` at `ends` (R,), with logits of some tokens (L,)."""
    rows = len(query_len)
    return StepPlan(
        step=0,
        slot=np.arange(rows, dtype=np.int32),
        query_start=ends - query_len,
        query_len=query_len,
        kv_len=kv_len,
        tokens=tokens,
        logit_tokens=logit_tokens,
        sampling=_GREEDY,
        page_tables=(page_table,),
    )
