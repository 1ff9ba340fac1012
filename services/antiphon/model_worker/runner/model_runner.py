"""One rank of a model: it runs plans in order, and every rank gets the same plans.

Axes: R rows, T tokens, L rows of logits, V vocabulary.
"""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from antiphon.kernels.attention import KvShape
from antiphon.kernels.bidirectional import NoCache
from antiphon.kernels.cpu.fused_decoder import FusedDecoderOutput
from antiphon.kernels.kv import KvSpec
from antiphon.kernels.op import DeviceCapability, KernelUnavailable
from antiphon.kernels.ops import select
from antiphon.kernels.states import StateSpec
from antiphon.layers.attention import AttentionSpec
from antiphon.layers.mla import LatentSpec
from antiphon.model_worker.batching.plan import RowStatus, StepOutcome, StepPlan
from antiphon.model_worker.cache.groups import GroupKind
from antiphon.model_worker.runner.acceptance import accept
from antiphon.model_worker.runner.context import ForwardContexts
from antiphon.model_worker.runner.determinism import require_invariant
from antiphon.model_worker.runner.errors import PlanRefused
from antiphon.model_worker.runner.input_batch import FutureTokens, InputBatch, build_input_batch
from antiphon.model_worker.runner.kv_pool import KvPool
from antiphon.model_worker.runner.logprobs import LogprobsComputer
from antiphon.model_worker.runner.nonfinite_rows import failed_rows
from antiphon.model_worker.runner.sampling import Sampler, changes_logits, greedy
from antiphon.model_worker.runner.state_pool import StatePool

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from antiphon.kernels.latent import LatentSizes
    from antiphon.kernels.op import BackendChoice
    from antiphon.layers.context import Adapters, ForwardContext
    from antiphon.model_worker.batching.plan import Ints, SamplingColumns
    from antiphon.model_worker.cache.groups import CacheGroup
    from antiphon.model_worker.model.load import LoadedModel
    from antiphon.model_worker.model.spec import ModelSpec
    from antiphon.model_worker.runner.pooling import Pooler


class ModelRunner:
    """Runs plans on one rank. Not thread-safe: one thread calls `run`, once a step.

    A plan's page tables are in the order of `groups`. `forced` names a backend by op name; `fused`
    false runs layer by layer what could be one call, with the same bits. With a `pooler` its plans
    make vectors of prompts, and draw nothing. A `deterministic` runner gives a row its bits
    whatever else is in its plans, and however its tokens came to be computed.

    Raises:
        KernelUnavailable: The device, or a forced backend, is not one that this build has; or what
            was chosen cannot be deterministic.
    """

    def __init__(
        self,
        model: LoadedModel,
        groups: tuple[CacheGroup, ...],
        *,
        adapters: Adapters | None = None,
        forced: dict[str, str] | None = None,
        fused: bool = True,
        pooler: Pooler | None = None,
        deterministic: bool = False,
    ) -> None:
        spec, placement = model.spec, model.build
        if placement.device.type != "cpu":
            raise KernelUnavailable(f"this runner computes on cpu, not on {placement.device}")
        self.ops = select(DeviceCapability.of(placement.device, placement.dtype), forced)
        attending = [
            (group, *_attention_of(spec, group))
            for group in groups
            if group.kind not in (GroupKind.STATE, GroupKind.PASS)
        ]
        self.pools = tuple(KvPool(group, kept, placement) for group, _, kept in attending)
        states = tuple(
            StatePool(group, _state_of(spec, group), placement)
            for group in groups
            if group.kind is GroupKind.STATE
        )
        self._states_count = len(states)
        self._model = model
        self._shapes = tuple(_shape(model, *attends) for attends in attending)
        if deterministic:
            require_invariant(model, self.ops.choices)
        self._contexts = ForwardContexts(
            model,
            self.ops,
            self.pools,
            states,
            adapters=adapters,
            fused=fused,
            deterministic=deterministic,
        )
        self._futures = FutureTokens()
        self._sampler = Sampler(self.ops)
        self._logprobs = LogprobsComputer(self.ops)
        self._pooler = pooler
        self._step: int | None = None
        self._columns: SamplingColumns | None = None
        self._greedy = False

    def run(self, plan: StepPlan) -> StepOutcome:
        """Compute a plan's pass and sample its tokens.

        A row whose hidden state or logits are not finite is reported and its tokens are wiped from
        the cache; the other rows are as if it had not been there.

        Raises:
            PlanRefused: A step was left out, or the plan uses what this runner does not have.
        """
        self._follow(plan.step)
        batch = build_input_batch(plan, self._shapes, self._states_count)
        try:
            return self._compute(plan, batch)
        except Exception:
            self._contexts.forget()
            # Whoever gets these pages next masks what lies beyond its own tokens, and a NaN that
            # was left there gets through a mask.
            self._wipe(batch, np.ones(len(plan.slot), np.bool_))
            raise

    def _compute(self, plan: StepPlan, batch: InputBatch) -> StepOutcome:
        tokens = self._futures.resolve(plan.tokens)
        bare = self._takes_argmax(plan)
        scored = self._contexts.score(plan, batch, tokens, bare=bare)
        if bare and scored is not None and scored.argmax is not None:
            # Nothing of torch is left to be done, and its mode costs as much as what is left.
            if batch.decodes and scored.finite is None and scored.logits_finite is None:
                return self._conclude_decodes(plan, scored.argmax)
            return self._conclude(plan, batch, tokens, scored, scored.argmax)
        with torch.inference_mode():
            if plan.pooling is not None:
                return self._pool(plan, batch, tokens)
            if scored is None:
                scored = self._score(plan, batch, tokens)
            barren = self._sampler.process_logits(plan, batch.logit_row, scored.logits)
            likeliest = None if changes_logits(plan) else scored.argmax
            sampled = self._sampler.sample(
                plan.sampling, scored.logits, batch.logit_row, batch.logit_position, likeliest
            )
            return self._conclude(plan, batch, tokens, scored, sampled, barren)

    def _takes_argmax(self, plan: StepPlan) -> bool:
        """Whether nothing is left to do with the logits; plans of one layout share the answer."""
        if plan.details is not None or changes_logits(plan):
            return False
        if plan.sampling is not self._columns:
            self._columns, self._greedy = plan.sampling, greedy(plan.sampling)
        return self._greedy

    def _conclude_decodes(self, plan: StepPlan, sampled: Ints) -> StepOutcome:
        """What `_conclude` comes to where nothing was drafted, nothing failed and nothing is told.

        Nearly every step is such a one, and each call that it leaves out is cold code.
        """
        rows = len(plan.slot)
        self._futures.record_each(plan.slot, sampled)
        return StepOutcome(
            step=plan.step, starts=_one_each(rows), token_ids=sampled, status=_all_well(rows)
        )

    def _conclude(
        self,
        plan: StepPlan,
        batch: InputBatch,
        tokens: Ints,
        scored: FusedDecoderOutput,
        sampled: Ints,
        barren: NDArray[np.bool_] | None = None,
    ) -> StepOutcome:
        """What becomes of the sampled tokens (L,), where some rows, (R,), may have none."""
        rows = len(plan.slot)
        failed = failed_rows(batch, rows, scored.finite, scored.logits_finite)
        ended = _either(failed, barren)
        if batch.decodes and ended is None:  # nothing was drafted
            starts, token_ids = _one_each(rows), sampled
        else:
            wanted, row = plan.logit_tokens, batch.logit_row
            starts, token_ids = accept(tokens, wanted, row, sampled, rows, ended)
        details = self._logprobs.compute(
            plan,
            scored.hidden,
            scored.logits,
            partial(self._head, plan, batch),
            (starts, token_ids),
        )
        self._futures.record(plan.slot, starts, token_ids, ended)
        self._sampler.count(plan, starts, token_ids)
        status = _all_well(rows)
        if ended is not None:
            status = status.copy()
            status[ended] = RowStatus.NO_TOKEN
        if failed is not None:
            status[failed] = RowStatus.NON_FINITE
            self._wipe(batch, failed)
        return StepOutcome(
            step=plan.step, starts=starts, token_ids=token_ids, status=status, details=details
        )

    def _pool(self, plan: StepPlan, batch: InputBatch, tokens: Ints) -> StepOutcome:
        """What prompts became; a row that is not finite is one that failed, as it is elsewhere."""
        if self._pooler is None:
            raise PlanRefused(f"step {plan.step}: this runner makes no vectors")
        ctx, left, finite = self._layers(plan, batch, tokens)
        rows = len(plan.slot)
        failed = failed_rows(batch, rows, finite, None)
        if failed is None:
            failed = np.zeros(rows, np.bool_)

        def score(pooled: Tensor) -> Tensor:
            return self._model.own_decoder.scores(ctx, pooled.to(left.dtype))

        vectors = self._pooler.pool(plan, left, score)
        of_row = np.repeat(np.arange(rows), np.diff(vectors.starts))
        failed[of_row[~np.isfinite(vectors.values)]] = True
        if failed.any():
            self._wipe(batch, failed)
        return StepOutcome(
            step=plan.step,
            starts=np.zeros(rows + 1, np.int32),
            token_ids=np.zeros(0, np.int32),
            status=np.where(failed, RowStatus.NON_FINITE, RowStatus.OK).astype(np.int32),
            vectors=vectors,
        )

    def _follow(self, step: int) -> None:
        if self._step is not None and step != self._step + 1:
            raise PlanRefused(f"step {step} does not follow step {self._step}")
        self._step = step

    @property
    def choices(self) -> tuple[BackendChoice[..., object], ...]:
        """What runs each operation here, and why."""
        return (self._contexts.choice, *self.ops.choices)

    def _layers(
        self, plan: StepPlan, batch: InputBatch, tokens: Ints
    ) -> tuple[ForwardContext, Tensor, Tensor | None]:
        """The context of a pass, what its layers leave (T, hidden), and which of it is finite."""
        ctx = self._contexts.of(plan, batch)
        left = self._model.decoder.forward(ctx, tokens=torch.as_tensor(tokens.astype(np.int64)))
        finite = left.finite if left.checked else self.ops.finite_rows(left.last)
        return ctx, left.last, finite

    def _score(self, plan: StepPlan, batch: InputBatch, tokens: Ints) -> FusedDecoderOutput:
        """A pass operation by operation. Only wanted rows have logits: the head is wide."""
        ctx, hidden, finite = self._layers(plan, batch, tokens)
        wanted = hidden
        if len(plan.logit_tokens) < len(hidden):
            wanted = hidden.index_select(0, torch.as_tensor(plan.logit_tokens))
        logits = self._model.decoder.logits(ctx, wanted)
        return FusedDecoderOutput(hidden, finite, logits, self.ops.finite_rows(logits), None)

    def _head(self, plan: StepPlan, batch: InputBatch, hidden: Tensor) -> Tensor:
        """Logits of more of a pass's hidden states: (rows, hidden)  ->  (rows, V) float32."""
        return self._model.decoder.logits(self._contexts.of(plan, batch), hidden)

    def _wipe(self, batch: InputBatch, failed: NDArray[np.bool_]) -> None:
        """Zero what failed rows wrote in this pass; what earlier passes wrote was finite."""
        wiped = torch.as_tensor(np.flatnonzero(failed[batch.token_row]))
        for pool, rows in zip(self.pools, batch.groups, strict=True):
            pool.zero(rows.slot_mapping[wiped])


@cache
def _one_each(rows: int) -> Ints:
    """Where each row's token begins if all have one, (R + 1,); many outcomes share it."""
    return _shared(np.arange(rows + 1, dtype=np.int32))


@cache
def _all_well(rows: int) -> Ints:
    """The status of rows that are all as they should be, (R,); many outcomes share it."""
    return _shared(np.full(rows, RowStatus.OK, np.int32))


def _shared(values: Ints) -> Ints:
    values.flags.writeable = False
    return values


def _either(
    one: NDArray[np.bool_] | None, other: NDArray[np.bool_] | None
) -> NDArray[np.bool_] | None:
    """Rows that are in one or in both, where None stands for no row."""
    if one is None or other is None:
        return other if one is None else one
    return one | other


def _attention_of(
    spec: ModelSpec, group: CacheGroup
) -> tuple[AttentionSpec | LatentSpec, KvSpec | LatentSizes]:
    """An attention of the group and what it keeps: those of all its layers keep the same."""
    mixers = spec.layers[group.layers[0]].mixers
    mixer = next(mixer for mixer in mixers if isinstance(mixer, AttentionSpec | LatentSpec))
    assert not isinstance(mixer.cache, NoCache), "a group of pages"
    return mixer, mixer.cache


def _state_of(spec: ModelSpec, group: CacheGroup) -> StateSpec:
    """What each layer of a group of states keeps."""
    caches = [mixer.cache for mixer in spec.layers[group.layers[0]].mixers]
    return next(cache for cache in caches if isinstance(cache, StateSpec))


def _shape(
    model: LoadedModel,
    group: CacheGroup,
    mixer: AttentionSpec | LatentSpec,
    kept: KvSpec | LatentSizes,
) -> KvShape:
    ranks = model.build.tp.ranks
    heads = kept.heads_of(ranks)
    chunked = isinstance(kept, KvSpec) and kept.chunked
    return KvShape(
        page_tokens=group.page_tokens,
        heads=heads,
        queries_per_head=mixer.query_heads // ranks // heads,
        head_size=kept.head_size,
        dtype=model.build.dtype,
        window=None if chunked else group.window,
        chunk=group.window if chunked else None,
    )
