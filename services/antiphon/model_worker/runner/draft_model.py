"""The draft model of speculative decoding: a small model with pages of its own.

Axes: R rows, T tokens of all rows, L drafts of a pass, N pages of the longest row.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from antiphon.kernels.ops import select
from antiphon.kernels.upload import upload_to
from antiphon.layers.weights import SingleRank
from antiphon.model_worker.batching.plan import SamplingColumns, StepPlan
from antiphon.model_worker.model.decoder import Decoder
from antiphon.model_worker.model.errors import ModelLoadError
from antiphon.model_worker.model.spec import HeadSpec
from antiphon.model_worker.runner.context import ForwardContexts
from antiphon.model_worker.runner.input_batch import InputBatch
from antiphon.model_worker.runner.pools import KvPool, attention_of, draft_group, kv_shape
from antiphon.model_worker.runner.required_kernels import capability_of, require_kernels

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from antiphon.kernels.op import BackendChoice
    from antiphon.layers.weights import Tp
    from antiphon.model_worker.batching.plan import Ints, StepOutcome
    from antiphon.model_worker.model.load import LoadedModel

NO_DRAFT = -1
"""Where a row has no draft token, or no more."""
_GREEDY = SamplingColumns.zeros(0)
"""A pass takes the argmax of all its logits, and no row has parameters."""


class DraftModel:
    """Drafts the likeliest continuations of rows, token by token. Not thread-safe.

    It computes the same bits for a row whatever else is in the pass where its kernels do: the text
    that is verified does not depend on them. The host waits for each of its passes.

    Raises:
        ModelLoadError: The model cannot draft: it has no logits, or layers that do not cache keys
            and values of the whole context.
        KernelUnavailable: An operation of its layers has no kernel on the device.
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
        attends = attention_of(spec, 0)
        self.ops = select(capability_of(build, spec), forced)
        on_cpu = build.device_kind == "cpu"
        if not on_cpu:
            require_kernels(model, self.ops.choices)
        self._device_ranks: Tp = SingleRank() if on_cpu else build.tp
        self._upload = upload_to(build.device_kind, build.device)
        self.pool = KvPool(self.group, attends[1], build)
        self._shapes = (kv_shape(model, self.group, *attends),)
        self._contexts = ForwardContexts(model, self.ops, (self.pool,), fused=fused and on_cpu)
        self.aux_layers: tuple[int, ...] = ()
        """Layers of the served model whose inputs it reads, see `HiddenStates.aux`."""

    @property
    def choices(self) -> tuple[BackendChoice[..., object], ...]:
        """The backend that each operation uses here, and why."""
        return (self._contexts.choice, *self.ops.choices)

    def draft_after(self, plan: StepPlan, outcome: StepOutcome, aux: Tensor | None) -> Ints:
        """The drafts (R, K) after rows of a plan, which asks for them.

        They follow what of a row was computed, and the last token sampled. aux (T, layers * hidden
        of the served model) are the inputs of its `aux_layers`.
        """
        assert aux is None, "a model of its own reads nothing but tokens"
        counts = _counts(plan, outcome)
        drafts = np.full((len(counts), counts.max(initial=0)), NO_DRAFT, np.int32)
        read = np.flatnonzero(outcome.computed > 0)
        if not len(read):
            return drafts
        pieces: list[Ints] = []
        for row in read.tolist():
            start, end = plan.query_start.item(row), outcome.starts.item(row + 1)
            pieces.append(plan.tokens[start : start + outcome.computed.item(row)])
            if counts[row]:
                pieces.append(outcome.token_ids[end - 1 : end])
        lengths = (outcome.computed + (counts > 0))[read].astype(np.int32)
        ends = (plan.kv_len - plan.query_len)[read] + lengths
        tokens = np.concatenate(pieces).astype(np.int32, copy=False)
        drafts[read] = self.draft(tokens, lengths, ends, plan.page_tables[-1][read], counts[read])
        return drafts

    def draft(
        self,
        tokens: Ints,
        query_len: Ints,
        kv_len: Ints,
        page_table: Ints,
        counts: Ints,
        aux: Tensor | None = None,
    ) -> Ints:
        """Read tokens of rows into their pages, and draft what follows them.

        tokens (T,) ids of all rows, one row after the other; query_len (R,) tokens of a row, at
        least one; kv_len (R,) its tokens in the cache with these; page_table (R, N), for at least
        `kv_len + counts - 1` tokens of a row with drafts; counts (R,) how many drafts a row gets,
        0: it is only read; aux (T, layers * hidden of the served model), what a draft head reads
        beside each token  ->  drafts (R, max(counts)), -1 beyond a row's count

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
        found, states = self._run(plan, aux, None)
        for number in range(drafts.shape[1]):
            drafts[rows, number] = found
            going = (counts[rows] > number + 1) & (found != NO_DRAFT)
            if not np.count_nonzero(going):
                break
            rows, tokens = rows[going], found[going]
            states = None if states is None else states[self._upload(going)]
            ends = np.arange(1, len(rows) + 1, dtype=np.int32)
            one_each = np.ones(len(rows), np.int32)
            longer = kv_len[rows] + np.int32(number + 1)
            plan = _plan(tokens, one_each, ends, longer, page_table[rows], ends - 1)
            found, states = self._run(plan, None, states)
        return drafts

    def _run(
        self, plan: StepPlan, aux: Tensor | None, states: Tensor | None
    ) -> tuple[Ints, Tensor | None]:
        """The argmax of the logits of a pass, (L,), -1 for a row that is not finite.

        A draft head reads hidden states of the served model beside its tokens, or else states
        (T, hidden) of its own, and returns those beside the tokens found, (L, hidden).
        """
        batch = InputBatch(plan, self._shapes, 0, upload=self._upload)
        try:
            found = self._likeliest(plan, batch, aux, states)
        except Exception:
            self._contexts.forget()
            self._wipe(batch, np.ones(len(plan.slot), np.bool_))
            raise
        failed, token_ids = batch.failed_rows(found.finite, found.logits_finite), found.token_ids
        if failed is not None:
            self._wipe(batch, failed)
            token_ids = np.where(failed[batch.logit_row], np.int32(NO_DRAFT), token_ids)
        return self._of_first_rank(token_ids), found.states

    def _of_first_rank(self, token_ids: Ints) -> Ints:
        """What the first of several ranks on devices has found, on all of them.

        What is drafted is verified, and may end the passes: it must be the same. Sums of ranks on
        CPUs have the same bits on all of them.
        """
        ranks = self._device_ranks
        if ranks.ranks == 1:
            return token_ids
        mine = self._upload(token_ids if ranks.rank == 0 else np.zeros_like(token_ids))
        return ranks.all_reduce(mine).cpu().numpy()

    def _likeliest(
        self, plan: StepPlan, batch: InputBatch, aux: Tensor | None, states: Tensor | None
    ) -> _Likeliest:
        assert aux is None, "a model of its own reads nothing but tokens"
        assert states is None, "a model of its own reads nothing but tokens"
        scored = self._contexts.score(plan, batch, plan.tokens, bare=True)
        if scored is not None:
            assert scored.argmax is not None, "one call computes it"
            return _Likeliest(scored.argmax, scored.finite, scored.logits_finite)
        with torch.inference_mode():
            token_ids = self._upload(plan.tokens.astype(np.int64))
            scored = self._contexts.score_by_layer(plan, batch, token_ids)
            found = self.ops.argmax(scored.logits).cpu().numpy().astype(np.int32)
        return _Likeliest(found, scored.finite, scored.logits_finite)

    def _wipe(self, batch: InputBatch, failed: NDArray[np.bool_]) -> None:
        """Zero what failed rows wrote in a pass: a NaN would get through the mask of attention."""
        wiped = self._upload(np.flatnonzero(failed[batch.token_row]))
        self.pool.zero(batch.groups[0].slot_mapping[wiped])


class DraftHeadModel(DraftModel):
    """Drafts by a draft head (EAGLE-3), which reads hidden states of the served model.

    The entry of a position in its cache is made of the token after it. Where a cached page ends, it
    may come from another request, whose token was another: that costs a draft and no more.

    Raises:
        ModelLoadError: The served model has not the layers whose inputs the head reads.
    """

    def __init__(
        self, model: LoadedModel, served: LoadedModel, *, page_tokens: int, pages: int
    ) -> None:
        super().__init__(model, page_tokens=page_tokens, pages=pages)
        head, layers = model.spec.draft_head, len(served.spec.layers)
        assert head is not None, "a spec of a draft head"
        self.aux_layers = wanted = head.aux_layers_of(layers)
        if not all(one < other for one, other in pairwise((-1, *wanted, layers))):
            raise ModelLoadError(
                f"the draft head reads what enters layers {wanted} of the served model, which has "
                f"{layers}: eagle_config.eagle_aux_hidden_state_layer_ids of its config.json names "
                "them by their outputs, ascending, without the last one"
            )
        if not isinstance(served.decoder, Decoder):
            raise ModelLoadError(
                "the served model runs on transformers' modules, which give no hidden states of "
                "single layers to a draft head"
            )
        if served.spec.streams is not None:
            raise ModelLoadError(
                "the served model has several residual streams, and a draft head reads one"
            )
        assert served.decoder.embedding is not None, "a served model of one stage"
        self._head = model.draft_head
        self._embedding = served.decoder.embedding

    def draft_after(self, plan: StepPlan, outcome: StepOutcome, aux: Tensor | None) -> Ints:
        assert aux is not None, "the served model gives hidden states of these layers"
        counts = _counts(plan, outcome)
        drafts = np.full((len(counts), counts.max(initial=0)), NO_DRAFT, np.int32)
        read = np.flatnonzero(outcome.computed > 0)
        if not len(read):
            return drafts
        lengths = outcome.computed[read].astype(np.int32)
        after = np.cumsum(lengths)
        places = np.repeat(plan.query_start[read] - after + lengths, lengths)
        places += np.arange(after[-1], dtype=np.int32)
        tokens = plan.tokens[np.minimum(places + 1, len(plan.tokens) - 1)]
        tokens[after - 1] = self._next_tokens(plan, outcome)[read]
        ends = (plan.kv_len - plan.query_len)[read] + lengths
        tables = plan.page_tables[-1][read]
        beside = aux.index_select(0, self._upload(places))
        drafts[read] = self.draft(tokens, lengths, ends, tables, counts[read], beside)
        return drafts

    @staticmethod
    def _next_tokens(plan: StepPlan, outcome: StepOutcome) -> Ints:
        """The token after what of each row was computed, (R,)."""
        assert plan.next_tokens is not None, "a plan of a worker with drafts"
        next_tokens, last = plan.next_tokens.copy(), outcome.starts[1:] - 1
        sampled = last >= outcome.starts[:-1]
        next_tokens[sampled] = outcome.token_ids[last[sampled]]
        return next_tokens

    def _likeliest(
        self, plan: StepPlan, batch: InputBatch, aux: Tensor | None, states: Tensor | None
    ) -> _Likeliest:
        with torch.inference_mode():
            ctx = self._contexts.of(plan, batch)
            if aux is not None:
                states = self._head.project(ctx, aux)
            assert states is not None, "it reads hidden states"
            embedded = self._embedding.embed(ctx, self._upload(plan.tokens.astype(np.int64)))
            hidden, after = self._head.forward(ctx, embedded, states)
            wanted = self._upload(plan.logit_tokens)
            logits = self._head.logits(ctx, hidden.index_select(0, wanted))
            found = self._head.token_ids[self.ops.argmax(logits).long().cpu()]
            return _Likeliest(
                found.numpy().astype(np.int32),
                self.ops.finite_rows(hidden),
                self.ops.finite_rows(logits),
                after.index_select(0, wanted),
            )


class _Likeliest(NamedTuple):
    """The likeliest token after each of L tokens of a pass, and what of it is finite."""

    token_ids: Ints  # (L,)
    finite: Tensor | None  # (T,), None: all are
    logits_finite: Tensor | None  # (L,), likewise
    states: Tensor | None = None  # (L, hidden), what a draft head reads beside each of them


def _counts(plan: StepPlan, outcome: StepOutcome) -> Ints:
    """How many drafts each row gets, (R,): none without a token that they follow."""
    assert plan.draft_counts is not None, "the plan asks for drafts"
    return np.where(np.diff(outcome.starts) > 0, plan.draft_counts, np.int32(0))


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
