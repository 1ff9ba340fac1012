"""The context of a forward pass: KV cache, RoPE, adapters, and whether the stack is fused."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from antiphon.kernels.kv import UNSCALED, KvSpec, LayerKvCache, store_tensor
from antiphon.kernels.latent import LatentMetadata, LatentSizes, latent_attention
from antiphon.kernels.op import BackendChoice
from antiphon.kernels.rotary import CosSinCaches, StepCosSin, apply_rotary
from antiphon.kernels.states import LayerStates
from antiphon.layers.context import Adapters, ForwardContext
from antiphon.model_worker.model.layer import NotStackable
from antiphon.model_worker.runner.input_batch import PlanRefused

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from antiphon.kernels.attention import AttentionMetadata
    from antiphon.kernels.cpu.fused_decoder import FusedDecoder, FusedDecoderOutput
    from antiphon.kernels.kv import KvScales
    from antiphon.kernels.ops import Ops
    from antiphon.kernels.states import StateMetadata
    from antiphon.layers.context import AttentionBackend, AttentionParams, LatentAttentionParams
    from antiphon.model_worker.batching.plan import Ints, StepPlan
    from antiphon.model_worker.model.load import LoadedModel
    from antiphon.model_worker.runner.input_batch import InputBatch
    from antiphon.model_worker.runner.pools import KvPool, StatePool

STACK = "decoder.stack"
"""The name under which the kernel table lists the fused decoder or the layer-by-layer one."""
BY_LAYER = "by layer"
_STACKED = (
    *("norm.rmsnorm", "norm.add_rmsnorm", "activation.silu_mul"),
    *("attention.heads", "attention.paged"),
)


class ForwardContexts:
    """Makes the context of each forward pass of one model on one rank.

    `fused=False` runs the layers one by one where they could be one call; `deterministic` leaves
    out what makes the bits of a token depend on the rest of the batch.
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
        kinds = [cache for cache, _ in model.spec.cache_groups()]
        self._latent = {i: kind for i, kind in enumerate(kinds) if isinstance(kind, LatentSizes)}
        self._causal = model.spec.causal
        self._deterministic = deterministic
        self._angles = CosSinCaches(placement.dtype, placement.device)
        self._stack: FusedDecoder | None = None
        self._stack_angles = self._angles.of(None)
        # With chunked attention, the rows of a sequence may differ from step to step.
        self._may_continue = not any(isinstance(kind, KvSpec) and kind.chunked for kind in kinds)
        self._continue_step: int | None = None  # step from which the fused decoder may continue
        self.choice = self._choose(model, fused=fused)

    def _choose(self, model: LoadedModel, *, fused: bool) -> BackendChoice[..., object]:
        decoder = model.decoder
        try:
            _refuse_apart(self._ops, fused=fused)
            self._stack = decoder.stack(self._caches)
            self._stack_angles = self._angles.of(decoder.rotary)
        except NotStackable as error:
            refused = (("cpu", str(error)),)
            # It is batch-invariant if its operations are.
            return BackendChoice(STACK, decoder.forward, BY_LAYER, refused, invariant=True)
        return BackendChoice(STACK, self._stack, "cpu", (), invariant=True)

    def score(
        self, plan: StepPlan, batch: InputBatch, tokens: Ints, *, bare: bool
    ) -> FusedDecoderOutput | None:
        """Run a pass as one call from `tokens` (T,) to logits; None where it is not supported.

        A `bare` result may be without logits.
        """
        stack, continue_step = self._stack, self._continue_step
        self._continue_step = None  # set again on success
        if stack is None:
            return None
        scored = None
        if plan.follows and continue_step == plan.step - 1:
            # A plan other than plain decode would have left no step to continue.
            scored = stack.decode_next(tokens, plan.page_tables, bare)
        if scored is None:
            if not stack.scores or plan.pooling is not None or self._adapted(plan):
                return None
            cos_sin = self._stack_angles.at_positions(plan.positions[0])
            scored = stack.score(tokens, plan.logit_tokens, cos_sin, batch.groups, argmax_only=bare)
        if self._may_continue:
            self._continue_step = plan.step
        return scored

    def forget(self) -> None:
        """After a failed pass: the next one does not continue from it."""
        self._continue_step = None

    def of(self, plan: StepPlan, batch: InputBatch) -> ForwardContext:
        rotations = StepCosSin(self._angles, plan.positions[0])
        adapted = self._adapted(plan)
        fused = None
        if self._stack is not None and not adapted:
            cos_sin = self._stack_angles.at_positions(plan.positions[0])
            fused = partial(self._stack, turns=cos_sin, groups=batch.groups)
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
        if self._causal:
            return PagedAttend(self._ops, self._caches, batch.groups, rotations)
        if (plan.query_len != plan.kv_len).any():
            raise PlanRefused(
                f"step {plan.step}: bidirectional attention needs the whole text in one pass"
            )
        return BidirectionalAttend(self._ops, plan.query_len.tolist(), rotations)

    def _attend_latent(self, batch: InputBatch, rotations: StepCosSin) -> PagedLatentAttend:
        rows = {
            index: LatentMetadata(batch.groups[index], sizes, absorbed=self._deterministic)
            for index, sizes in self._latent.items()
        }
        return PagedLatentAttend(self._ops, self._caches, rows, rotations)


@dataclass(frozen=True, slots=True)
class PagedAttend:
    """Attention over the paged KV cache of one forward pass."""

    ops: Ops
    layers: dict[int, LayerKvCache]
    groups: tuple[AttentionMetadata, ...]
    rotations: StepCosSin

    def __call__(self, layer: int, heads: Tensor, params: AttentionParams) -> Tensor:
        """Apply RoPE, write this pass's keys and values, and attend to all of each row's."""
        cache = self.layers[layer]
        rows = self.groups[cache.group]
        cos, sin = self.rotations.of(params.rotary).by_token
        keys, values, scales = cache.keys, cache.values, cache.scales
        q = self.ops.qk_norm_rope_store(
            heads, cos, sin, keys, values, rows.slot_mapping, params.norms, scales
        )
        scale = params.scale
        if params.softcap is None and params.sinks is None:
            return self.ops.paged_attention(q, keys, values, rows, scale, scales)
        return self.ops.softcap_sink_attention(
            q, keys, values, rows, scale, params.softcap, params.sinks, scales
        )


@dataclass(frozen=True, slots=True)
class PagedStates:
    """The recurrent states of one forward pass, and the places that each row reads and writes."""

    layers: dict[int, LayerStates]
    groups: tuple[StateMetadata, ...]

    def __call__(self, layer: int) -> tuple[LayerStates, StateMetadata]:
        states = self.layers[layer]
        return states, self.groups[states.group]


@dataclass(frozen=True, slots=True)
class BidirectionalAttend:
    """Bidirectional attention: all tokens of a row are in the same forward pass; no KV cache."""

    ops: Ops
    lengths: list[int]
    rotations: StepCosSin

    def __call__(self, layer: int, heads: Tensor, params: AttentionParams) -> Tensor:
        """Apply RoPE, and let each token attend to its row: (T, Q + 2 H, D) -> (T, Q, D)."""
        del layer  # all layers attend to the same tokens
        keys = heads.shape[1] - 2 * params.kv_heads
        values = keys + params.kv_heads
        cos, sin = self.rotations.of(params.rotary).by_token
        rotated = apply_rotary(heads[:, :values], cos, sin)
        q, k, v = rotated[:, :keys], rotated[:, keys:], heads[:, values:]
        return self.ops.bidirectional_attention(q, k, v, self.lengths, params.scale, params.window)


@dataclass(frozen=True, slots=True)
class PagedLatentAttend:
    """Latent attention (MLA) over the paged cache of one forward pass."""

    ops: Ops
    layers: Mapping[int, LayerKvCache]
    groups: Mapping[int, LatentMetadata]
    rotations: StepCosSin

    def __call__(
        self, layer: int, q: Tensor, latents: Tensor, params: LatentAttentionParams
    ) -> Tensor:
        """Apply RoPE, write this pass's latents, and attend to all of each row's."""
        cache = self.layers[layer]
        rows = self.groups[cache.group]
        cos, sin = self.rotations.of(params.rotary).by_token
        q = _rotated(q, rows.sizes.content, cos, sin)
        rotated = _rotated(latents[:, None], rows.sizes.latent, cos, sin)
        store_tensor(rotated, cache.keys, rows.rows.slot_mapping, cache.scales.key)
        attend = self.ops.paged_attention
        return latent_attention(q, cache, rows, params.heads, params.scale, attend)


def _rotated(heads: Tensor, first: int, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads (T, H, D) with the elements from `first` on rotated."""
    return torch.cat((heads[..., :first], apply_rotary(heads[..., first:], cos, sin)), dim=-1)


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
    if not fused:
        raise NotStackable("the fused decoder is disabled")
    for choice in ops.choices:
        if choice.op in _STACKED and choice.backend != "cpu":
            raise NotStackable(f"{choice.op} runs on {choice.backend}")
