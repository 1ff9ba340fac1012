"""One rank of a model: runs step plans in order; every rank receives the same plans.

Axes: R rows, T tokens, L rows of logits, V vocabulary.
"""

from __future__ import annotations

import logging
from functools import cache, partial
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np
import torch

from antiphon.kernels.ops import select
from antiphon.kernels.recurrent import StateSpec
from antiphon.kernels.upload import upload_to
from antiphon.model_worker.batching.plan import (
    PLAIN,
    Flags,
    Ints,
    PooledVectors,
    RowStatus,
    Sampled,
    SamplingColumns,
    SamplingPart,
    StepOutcome,
    StepPlan,
)
from antiphon.model_worker.batching.slot_tables import SlotTables
from antiphon.model_worker.cache.groups import CacheGroup, GroupKind
from antiphon.model_worker.runner.alignment import align
from antiphon.model_worker.runner.context import ForwardContexts
from antiphon.model_worker.runner.cross_cache import CrossCache
from antiphon.model_worker.runner.input_batch import (
    InputBatch,
    PlanRefused,
    SlotState,
)
from antiphon.model_worker.runner.logprobs import LogprobsComputer
from antiphon.model_worker.runner.pools import (
    KvPool,
    StatePool,
    attention_of,
    kv_shape,
)
from antiphon.model_worker.runner.prefault import Prefault
from antiphon.model_worker.runner.required_kernels import (
    capability_of,
    require_invariant,
    require_kernels,
)
from antiphon.model_worker.runner.sampling import Sampler, accept, greedy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from antiphon.kernels.cpu.fused_decoder import FusedDecoderOutput
    from antiphon.kernels.op import BackendChoice
    from antiphon.layers.context import ForwardContext
    from antiphon.model_worker.cache.codec import PageMemory
    from antiphon.model_worker.cache.pages import CachePools
    from antiphon.model_worker.model.load import LoadedModel
    from antiphon.model_worker.model.spec import ModelSpec
    from antiphon.model_worker.runner.draft_model import DraftModel
    from antiphon.model_worker.runner.pooling import Pooler

log = logging.getLogger(__name__)

SLOTS = 64
"""Default of the slots that requests run in."""


class SampleExchange(Protocol):
    """Gives all ranks of a worker the tokens that one of them samples."""

    @property
    def shared(self) -> bool:
        """Whether the next `share` does not wait for another rank."""
        ...

    def share(self, step: int, sample: Callable[[], Sampled]) -> Sampled: ...


class ModelRunner:
    """Runs step plans on one rank. Not thread-safe: one thread calls `run`, once a step.

    The page tables of a plan are in the order of `groups`. `forced` names a backend by op name;
    `fused=False` runs the decoder layer by layer where one call could run it, with the same bits.
    With a `pooler`, plans produce embedding vectors and sample nothing. A `deterministic` runner
    computes the same bits for a sequence whatever else is in the batch, and however its prefill was
    chunked. With a `draft` model, the last of the groups is that model's. One of several ranks gets
    its tokens by an `exchange`. A model with cross attention has a cache of it for so many `slots`.

    Raises:
        KernelUnavailable: This build does not support the device or a forced backend, or a chosen
            backend is not deterministic.
    """

    def __init__(
        self,
        model: LoadedModel,
        groups: tuple[CacheGroup, ...],
        *,
        forced: dict[str, str] | None = None,
        fused: bool = True,
        pooler: Pooler | None = None,
        deterministic: bool = False,
        draft: DraftModel | None = None,
        exchange: SampleExchange | None = None,
        slots: int = SLOTS,
    ) -> None:
        spec, placement = model.spec, model.build
        self.ops = select(capability_of(placement, spec), forced, invariant=deterministic)
        if placement.device_kind != "cpu":
            require_kernels(model, self.ops.choices)
        self._upload = upload_to(placement.device_kind, placement.device)
        attending = [
            (group, *attention_of(spec, index))
            for index, group in enumerate(groups)
            if group.kind not in (GroupKind.STATE, GroupKind.PASS, GroupKind.DRAFT)
        ]
        self.pools = tuple(KvPool(group, cache, placement) for group, _, cache in attending)
        states = self.states = tuple(
            StatePool(group, _state_of(spec, index), placement)
            for index, group in enumerate(groups)
            if group.kind is GroupKind.STATE
        )
        self._states_count = len(states)
        self._group = placement.attention_group
        self._model = model
        self._shapes = tuple(kv_shape(model, *attends) for attends in attending)
        if deterministic:
            require_invariant(model, self.ops.choices)
        cross = None
        if spec.cross is not None:
            page_tokens = groups[0].page_tokens
            cross = CrossCache(model, spec.cross, page_tokens=page_tokens, slots=slots)
        self._contexts = ForwardContexts(
            model,
            self.ops,
            self.pools,
            states,
            cross=cross,
            fused=fused,
            deterministic=deterministic,
            aux_layers=() if draft is None else draft.aux_layers,
        )
        self._tables = SlotTables(groups)
        self._slots = SlotState()
        self._states = slice(len(self._shapes), len(self._shapes) + self._states_count)
        self._sampler = Sampler(self.ops, self._upload)
        self._logprobs = LogprobsComputer(self.ops, upload=self._upload)
        self._pooler = pooler
        self.draft = draft
        self._exchange = exchange
        self._reads_natively = spec.causal and any(
            choice.op == "attention.paged" and choice.backend == "cpu"
            for choice in self.ops.choices
        )
        self._checked: dict[int, InputBatch] = {}  # by step
        self._undrafted: tuple[StepOutcome, Tensor | None] | None = None
        self._aux: Tensor | None = None  # of the last pass, what a draft model reads of it
        self._step: int | None = None
        self._columns: SamplingColumns | None = None
        self._greedy = False

    def check(self, plan: StepPlan) -> StepPlan:
        """Build all that a plan needs before its first layer  ->  the plan to `run`.

        Of several ranks each does so when a plan is launched, in order, while another one may be
        computed: what is wrong with a plan must be known before they wait for each other.

        Raises:
            PlanRefused: The plan uses what this runner does not support.
        """
        plan = self._tables.fill(plan)
        if plan.future_start is not None:
            return plan  # where its rows begin is known when the plan before it has run
        batch = self._batch(plan)
        batch.build(compiled=self._reads_natively)
        self._checked[plan.step] = batch
        return plan

    def run(self, plan: StepPlan, part: Callable[[], SamplingPart] | None = None) -> StepOutcome:
        """Run the forward pass of a plan and sample its tokens.

        `part` waits for the sampling part of a plan without one.

        A row whose hidden state or logits are not finite is reported as failed and its tokens are
        zeroed in the KV cache; the other rows are unaffected.

        Raises:
            PlanRefused: A step was skipped, or the plan uses what this runner does not support.
        """
        if self._step is not None and plan.step != self._step + 1:
            raise PlanRefused(f"step {plan.step} does not follow step {self._step}")
        self._step = plan.step
        # Later plans rely on its changes and places, even if it fails or is refused.
        plan, batch = self._tables.fill(plan), None
        if plan.draft_counts is not None and self.draft is None:
            raise PlanRefused(f"step {plan.step}: this runner has no draft model")
        try:
            plan = self._slots.resolve(plan, self._states)
            if (batch := self._checked.pop(plan.step, None)) is None:
                batch = self._batch(plan)
            outcome = self._compute(plan, batch, part)
        except Exception:
            self._slots.record_failure(plan, self._states)
            if batch is not None:
                self._contexts.forget()
                # The next owner of these pages masks what lies beyond its own tokens, but a NaN
                # left there would get through the mask.
                self._wipe(batch, np.ones(len(plan.slot), np.bool_))
            raise
        if plan.draft_counts is not None:
            outcome = self._await_drafts(plan, outcome)
        self._aux = None
        return outcome

    def _await_drafts(self, plan: StepPlan, outcome: StepOutcome) -> StepOutcome:
        """Keep what drafts after a resolved plan are made of  ->  its outcome, with the plan."""
        self._slots.record_places(plan, outcome.computed, self._states)
        outcome = msgspec.structs.replace(outcome, plan=plan)
        self._undrafted = outcome, self._aux
        return outcome

    def settle(self) -> None:
        """Record what was sampled from plans that have run: here `run` has done so."""

    def page_memories(self) -> list[PageMemory]:
        """Those of all groups, for threads that copy pages; last that of a draft model."""
        return [pool.memory for pool in self._every_pool]

    def prefault(self, pages: CachePools) -> Prefault:
        """What touches the memory of pools before steps do; that of a device is there already."""
        if self._model.build.device_kind != "cpu":
            return Prefault(())
        memories = [pool.memory for pool in self._every_pool]
        allocated = zip(pages.groups, pages.pools, strict=True)
        return Prefault(
            (pool, memory)
            for group, pool in allocated
            for memory in memories
            if memory.group is group
        )

    @property
    def _every_pool(self) -> Sequence[KvPool | StatePool]:
        drafting = () if self.draft is None else (self.draft.pool,)
        return *self.pools, *self.states, *drafting

    def _batch(self, plan: StepPlan) -> InputBatch:
        return InputBatch(plan, self._shapes, self._states_count, self._group, self._upload)

    def make_drafts(self) -> Ints:
        """Let the draft model read what the last plan computed, and make the drafts it asks for.

        Drafts of a pass that fails are token 0, and cost only the time to verify them  ->  (R, K)
        """
        undrafted, self._undrafted = self._undrafted, None
        assert undrafted is not None, "the last plan asks for no drafts"
        outcome, aux = undrafted
        assert self.draft is not None, "the plan was refused"
        plan = outcome.plan
        assert plan is not None, "plans with drafts are returned"
        assert plan.draft_counts is not None, "plans with drafts are returned"
        drafts = np.zeros((len(plan.slot), plan.draft_counts.max(initial=0)), np.int32)
        try:
            # Where there is none it is token 0: the host makes its masks along what is verified.
            drafts = np.maximum(self.draft.draft_after(plan, outcome, aux), 0)
        finally:
            self._slots.record_drafts(plan.slot, drafts)
        return drafts

    def _compute(
        self, plan: StepPlan, batch: InputBatch, wait: Callable[[], SamplingPart] | None
    ) -> StepOutcome:
        tokens = plan.tokens
        bare = self._takes_argmax(plan)
        scored = self._contexts.score(plan, batch, tokens, bare=bare)
        self._aux = None if scored is None else scored.aux
        if bare and scored is not None and scored.argmax is not None:
            # No torch call is left, and entering inference mode costs as much as the remaining
            # work.
            if batch.decodes and scored.finite is None and scored.logits_finite is None:
                return self._conclude_decodes(plan, scored.argmax)
            failed = batch.failed_rows(scored.finite, scored.logits_finite)
            sampled = Sampled(scored.argmax, None, failed)
            return self._conclude(plan, batch, tokens, scored, sampled)
        with torch.inference_mode():
            if plan.pooling is not None:
                return self._pool(plan, batch, tokens)
            if scored is None:
                scored = self._score(plan, batch, tokens)
                self._aux = scored.aux
            if plan.part is None:
                assert wait is not None, "a plan without a sampling part"
                plan = msgspec.structs.replace(plan, part=wait())
            sample = partial(self._sample, plan, batch, tokens, scored)
            if self._exchange is not None and len(plan.logit_tokens):
                sampled = self._exchange.share(plan.step, sample)
            else:
                sampled = sample()
            return self._conclude(plan, batch, tokens, scored, sampled)

    def _sample(
        self, plan: StepPlan, batch: InputBatch, tokens: Ints, scored: FusedDecoderOutput
    ) -> Sampled:
        part = plan.part
        assert part is not None, "a sampling part was given"
        blocked = self._sampler.process_logits(plan, batch.logit_row, tokens, scored.logits)
        argmax = None if part.changes_logits else scored.argmax
        sampled = self._sampler.sample(
            plan.sampling, scored.logits, batch.logit_row, batch.logit_position, argmax
        )
        return Sampled(sampled, blocked, batch.failed_rows(scored.finite, scored.logits_finite))

    def _takes_argmax(self, plan: StepPlan) -> bool:
        """Whether the argmax is all a plan needs of its logits; cached by the plan's layout."""
        part = plan.part
        if plan.details is not None or part is None:
            return False
        if part is not PLAIN and part.changes_logits:
            return False
        if plan.sampling is not self._columns:
            self._columns, self._greedy = plan.sampling, greedy(plan.sampling)
        return self._greedy

    def _conclude_decodes(self, plan: StepPlan, sampled: Ints) -> StepOutcome:
        """Fast path of `_conclude`: no draft tokens, no failed rows, no logprobs.

        Nearly every step takes it, and each call that it leaves out would run as cold code.
        """
        rows = len(plan.slot)
        self._slots.record_each(plan.slot, sampled)
        return StepOutcome(
            step=plan.step,
            starts=_one_each(rows),
            token_ids=sampled,
            status=_all_well(rows),
            computed=plan.query_len,
        )

    def _conclude(
        self,
        plan: StepPlan,
        batch: InputBatch,
        tokens: Ints,
        scored: FusedDecoderOutput,
        sampled: Sampled,
    ) -> StepOutcome:
        """The outcome of what was sampled."""
        rows, failed = len(plan.slot), sampled.failed
        starts, token_ids, ended = self._accept(plan, batch, tokens, sampled)
        head = partial(self._head, plan, batch)
        details = self._logprobs.compute(
            plan, scored.hidden, scored.logits, head, (starts, token_ids)
        )
        self._record_tokens(plan, starts, token_ids, ended)
        self._sampler.count(plan, starts, token_ids)
        status = _all_well(rows)
        if ended is not None:
            status = status.copy()
            status[ended] = RowStatus.NO_TOKEN
        if failed is not None:
            status[failed] = RowStatus.NON_FINITE
            self._wipe(batch, failed)
        return StepOutcome(
            step=plan.step,
            starts=starts,
            token_ids=token_ids,
            status=status,
            computed=batch.computed(np.diff(starts), status),
            times=self._times(plan),
            details=details,
        )

    def _times(self, plan: StepPlan) -> PooledVectors | None:
        """Where the aligned tokens of the prompts that end in a plan are, if there are any."""
        if (wanted := plan.alignment) is None:
            return None
        return align(wanted, len(plan.slot), self._contexts.run_alone, self._model.build.dtype)

    def _record_tokens(
        self, plan: StepPlan, starts: Ints, token_ids: Ints, ended: NDArray[np.bool_] | None
    ) -> None:
        """Record each row's last token for later plans."""
        self._slots.record(plan.slot, starts, token_ids, ended)

    def _accept(
        self, plan: StepPlan, batch: InputBatch, tokens: Ints, sampled: Sampled
    ) -> tuple[Ints, Ints, Flags | None]:
        """Offsets of accepted tokens (R + 1,), these, and which rows (R,) end; None: none does."""
        token_ids, blocked, failed = sampled
        rows = len(plan.slot)
        # A row in which only a token after a draft is blocked accepts what comes before it.
        ended = _either(failed, None if blocked is None else batch.first_logits(blocked))
        if batch.decodes and ended is None:  # no draft tokens
            return _one_each(rows), token_ids, None
        wanted, row = plan.logit_tokens, batch.logit_row
        starts, token_ids = accept(tokens, wanted, row, token_ids, rows, ended, blocked)
        return starts, token_ids, ended

    def _pool(self, plan: StepPlan, batch: InputBatch, tokens: Ints) -> StepOutcome:
        """Run the layers of a plan of prompts, and pool those that end in it."""
        texts = self._require_pooler(plan).texts(plan)
        token_ids = self._upload(tokens.astype(np.int64))
        ctx, (hidden, finite, _) = self._contexts.run_layers(texts, batch, token_ids)
        return self._pooled(plan, batch, ctx, hidden, batch.failed_rows(finite, None))

    def _require_pooler(self, plan: StepPlan) -> Pooler:
        if self._pooler is None:
            raise PlanRefused(f"step {plan.step}: this runner has no pooler")
        return self._pooler

    def _pooled(
        self,
        plan: StepPlan,
        batch: InputBatch,
        ctx: ForwardContext,
        hidden: Tensor,
        failed: Flags | None,
    ) -> StepOutcome:
        """Pool finished prompts into vectors; a row that is not finite fails, as in decoding."""
        rows = len(plan.slot)
        failed = np.zeros(rows, np.bool_) if failed is None else failed

        def score(pooled: Tensor) -> Tensor:
            return self._model.own_decoder.scores(ctx, pooled.to(hidden))

        vectors = self._require_pooler(plan).pool(plan, hidden, score)
        of_row = np.repeat(np.arange(rows), np.diff(vectors.starts))
        failed[of_row[~np.isfinite(vectors.values)]] = True
        if failed.any():
            self._wipe(batch, failed)
        return StepOutcome(
            step=plan.step,
            starts=np.zeros(rows + 1, np.int32),
            token_ids=np.zeros(0, np.int32),
            status=np.where(failed, RowStatus.NON_FINITE, RowStatus.OK).astype(np.int32),
            computed=np.where(failed, 0, plan.query_len),
            vectors=vectors,
        )

    @property
    def choices(self) -> tuple[BackendChoice[..., object], ...]:
        """The backend that each operation uses here, and why."""
        return (self._contexts.choice, *self.ops.choices)

    def _score(self, plan: StepPlan, batch: InputBatch, tokens: Ints) -> FusedDecoderOutput:
        return self._contexts.score_by_layer(plan, batch, self._upload(tokens.astype(np.int64)))

    def _head(self, plan: StepPlan, batch: InputBatch, hidden: Tensor) -> Tensor:
        """Logits of further hidden states of the pass: (rows, hidden)  ->  (rows, V) float32."""
        return self._model.decoder.logits(self._contexts.of(plan, batch), hidden)

    def _wipe(self, batch: InputBatch, failed: NDArray[np.bool_]) -> None:
        """Zero what failed rows wrote in this pass; what earlier passes wrote was finite."""
        own = batch.own
        if not len(own.plan.slot):
            return
        wiped = self._upload(np.flatnonzero(failed[batch.own_rows][own.token_row]))
        for pool, rows in zip(self.pools, own.groups, strict=True):
            pool.zero(rows.slot_mapping[wiped])


@cache
def _one_each(rows: int) -> Ints:
    """Offsets of accepted tokens if each row has one, (R + 1,); shared by many outcomes."""
    return _shared(np.arange(rows + 1, dtype=np.int32))


@cache
def _all_well(rows: int) -> Ints:
    """The status of rows that all succeeded, (R,); shared by many outcomes."""
    return _shared(np.full(rows, RowStatus.OK, np.int32))


def _shared(values: Ints) -> Ints:
    values.flags.writeable = False
    return values


def _either(
    one: NDArray[np.bool_] | None, other: NDArray[np.bool_] | None
) -> NDArray[np.bool_] | None:
    """Rows that are in either mask, where None stands for an empty mask."""
    if one is None or other is None:
        return other if one is None else one
    return one | other


def _state_of(spec: ModelSpec, index: int) -> StateSpec:
    """The state spec that all layers of a group of recurrent states share."""
    cache, _ = spec.cache_groups()[index]
    assert isinstance(cache, StateSpec), "a group of states"
    return cache
