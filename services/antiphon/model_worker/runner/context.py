"""What the layers know of a pass, made from its plan: cache, rotation, adapters, fused or not."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from antiphon.kernels.kv import UNSCALED, KvSpec, LayerKvCache
from antiphon.kernels.op import BackendChoice
from antiphon.kernels.rotary import CosSinCaches, StepCosSin
from antiphon.kernels.states import LayerStates
from antiphon.layers.context import Adapters, ForwardContext
from antiphon.model_worker.model.layer import NotStackable
from antiphon.model_worker.runner.bidirectional import BidirectionalAttend
from antiphon.model_worker.runner.latent import PagedLatentAttend, latent_groups, latent_rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from antiphon.kernels.attention import AttentionMetadata
    from antiphon.kernels.cpu.fused_decoder import FusedDecoder, FusedDecoderOutput
    from antiphon.kernels.kv import KvScales
    from antiphon.kernels.ops import Ops
    from antiphon.kernels.states import StateMetadata
    from antiphon.layers.context import AttentionBackend, AttentionParams
    from antiphon.model_worker.batching.plan import Ints, StepPlan
    from antiphon.model_worker.model.load import LoadedModel
    from antiphon.model_worker.runner.input_batch import InputBatch
    from antiphon.model_worker.runner.kv_pool import KvPool
    from antiphon.model_worker.runner.state_pool import StatePool

STACK = "decoder.stack"
"""What the table of kernels calls the choice between one call for all layers and many."""
BY_LAYER = "by layer"
_STACKED = (
    *("norm.rmsnorm", "norm.add_rmsnorm", "activation.silu_mul"),
    *("attention.heads", "attention.paged"),
)


class ForwardContexts:
    """Makes the context of each pass of one model on one rank.

    `fused` false keeps the layers apart where they could be one stack; `deterministic` leaves out
    what gives a token other bits beside other tokens.
    """

    def __init__(
        self,
        model: LoadedModel,
        ops: Ops,
        pools: tuple[KvPool, ...],
        states: tuple[StatePool, ...] = (),
        *,
        adapters: Adapters | None,
        fused: bool,
        deterministic: bool = False,
    ) -> None:
        placement = model.build
        self._ops = ops
        self._tp = placement.tp
        self._adapters = adapters
        self._caches = _caches(pools, model.kv_scales)
        self._states = _states(states)
        self._latent = latent_groups(model.spec)
        self._causal = model.spec.causal
        self._deterministic = deterministic
        self._angles = CosSinCaches(placement.dtype, placement.device)
        self._stack: FusedDecoder | None = None
        self._stack_angles = self._angles.of(None)
        # Of texts that are cut, what is a row may differ from pass to pass.
        self._goes_on = not any(
            isinstance(kept, KvSpec) and kept.chunked for kept, _ in model.spec.cache_groups()
        )
        self._kept: int | None = None  # step of the pass that the stack may go on from
        self.choice = self._choose(model, fused=fused)

    def _choose(self, model: LoadedModel, *, fused: bool) -> BackendChoice[..., object]:
        """One call for all layers, if that is to be and can be."""
        decoder = model.decoder
        try:
            _refuse_apart(self._ops, fused=fused)
            self._stack = decoder.stack(self._caches)
            self._stack_angles = self._angles.of(decoder.rotary)
        except NotStackable as error:
            refused = (("cpu", str(error)),)
            # It is as invariant as its operations are.
            return BackendChoice(STACK, decoder.forward, BY_LAYER, refused, invariant=True)
        return BackendChoice(STACK, self._stack, "cpu", (), invariant=True)

    def score(
        self, plan: StepPlan, batch: InputBatch, tokens: Ints, *, bare: bool
    ) -> FusedDecoderOutput | None:
        """Run a pass as one call from `tokens` (T,) to logits; None where it is not to be had.

        A `bare` result may be without them, as in `ServiceStack.score`.
        """
        stack, kept = self._stack, self._kept
        self._kept = None  # unless all goes well
        if stack is None:
            return None
        scored = None
        if plan.follows and kept == plan.step - 1:
            # Had the plan before asked for anything else, no stack would have run it.
            scored = stack.decode_next(tokens, plan.page_tables, bare)
        if scored is None:
            if not stack.scores or plan.pooling is not None or self._adapted(plan):
                return None
            turns = self._stack_angles.at_positions(plan.positions[0])
            scored = stack.score(tokens, plan.logit_tokens, turns, batch.groups, argmax_only=bare)
        if self._goes_on:
            self._kept = plan.step
        return scored

    def forget(self) -> None:
        """A pass has failed: the next one goes on from nothing."""
        self._kept = None

    def of(self, plan: StepPlan, batch: InputBatch) -> ForwardContext:
        """The context of one pass."""
        rotations = StepCosSin(self._angles, plan.positions[0])
        adapted = self._adapted(plan)
        fused = None
        if self._stack is not None and not adapted:
            turns = self._stack_angles.at_positions(plan.positions[0])
            fused = partial(self._stack, turns=turns, groups=batch.groups)
        return ForwardContext(
            ops=self._ops,
            tp=self._tp,
            attend=self._attend(plan, batch, rotations),
            states_of=PagedStates(self._states, batch.states) if batch.states else None,
            attend_latent=self._attend_latent(batch, rotations) if self._latent else None,
            positions=torch.as_tensor(plan.positions[0]),
            token_types=None if plan.token_types is None else torch.as_tensor(plan.token_types),
            token_adapter=torch.as_tensor(plan.adapter[batch.token_row]) if adapted else None,
            adapters=self._adapters if adapted else None,
            fused=fused,
        )

    def _adapted(self, plan: StepPlan) -> bool:
        return self._adapters is not None and bool((plan.adapter >= 0).any())

    def _attend(self, plan: StepPlan, batch: InputBatch, rotations: StepCosSin) -> AttentionBackend:
        if not self._causal:
            return BidirectionalAttend.of(self._ops, plan, rotations)
        return PagedAttend(self._ops, self._caches, batch.groups, rotations)

    def _attend_latent(self, batch: InputBatch, rotations: StepCosSin) -> PagedLatentAttend:
        rows = latent_rows(self._latent, batch.groups, absorbed=self._deterministic)
        return PagedLatentAttend(self._ops, self._caches, rows, rotations)


@dataclass(frozen=True, slots=True)
class PagedAttend:
    """The cache of one pass, as layers meet it."""

    ops: Ops
    layers: dict[int, LayerKvCache]
    groups: tuple[AttentionMetadata, ...]
    rotations: StepCosSin

    def __call__(self, layer: int, heads: Tensor, manner: AttentionParams) -> Tensor:
        """Rotate, keep this pass's keys and values, and attend over all of each row's."""
        cache = self.layers[layer]
        rows = self.groups[cache.group]
        cos, sin = self.rotations.of(manner.rotary).by_token
        keys, values, scales = cache.keys, cache.values, cache.scales
        q = self.ops.qk_norm_rope_store(
            heads, cos, sin, keys, values, rows.slot_mapping, manner.norms, scales
        )
        scale = manner.scale
        if manner.softcap is None and manner.sinks is None:
            return self.ops.paged_attention(q, keys, values, rows, scale, scales)
        return self.ops.softcap_sink_attention(
            q, keys, values, rows, scale, manner.softcap, manner.sinks, scales
        )


@dataclass(frozen=True, slots=True)
class PagedStates:
    """The recurrent states of one pass, as layers meet them."""

    layers: dict[int, LayerStates]
    groups: tuple[StateMetadata, ...]

    def __call__(self, layer: int) -> tuple[LayerStates, StateMetadata]:
        """Where a layer's states lie, and which of them each row reads and writes."""
        states = self.layers[layer]
        return states, self.groups[states.group]


def _caches(pools: tuple[KvPool, ...], scales: Mapping[int, KvScales]) -> dict[int, LayerKvCache]:
    return {
        layer: LayerKvCache(index, *pool.layer(place), scales.get(layer, UNSCALED))
        for index, pool in enumerate(pools)
        for place, layer in enumerate(pool.group.layers)
    }


def _states(pools: tuple[StatePool, ...]) -> dict[int, LayerStates]:
    return {
        layer: LayerStates(index, *pool.layer(place))
        for index, pool in enumerate(pools)
        for place, layer in enumerate(pool.group.layers)
    }


def _refuse_apart(ops: Ops, *, fused: bool) -> None:
    """Refuse a stack whose operations were chosen otherwise."""
    if not fused:
        raise NotStackable("layers are kept apart")
    for choice in ops.choices:
        if choice.op in _STACKED and choice.backend != "cpu":
            raise NotStackable(f"{choice.op} runs on {choice.backend}")
