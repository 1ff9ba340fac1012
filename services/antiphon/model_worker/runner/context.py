"""The context of a forward pass: KV cache, RoPE, and whether the stack is fused."""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from antiphon.kernels.attention import (
    AttentionMetadata,
    ImageRows,
    KvShape,
    TextRows,
    paged_attention,
)
from antiphon.kernels.cpu.fused_decoder import FusedDecoderOutput, UncachedHeads
from antiphon.kernels.cpu.ops import PASS_PAGE_TOKENS
from antiphon.kernels.kv import UNSCALED, KvSpec, LayerKvCache
from antiphon.kernels.latent import LatentMetadata, LatentSizes, latent_attention
from antiphon.kernels.op import BackendChoice
from antiphon.kernels.recurrent import LayerStates
from antiphon.kernels.rotary import CosSinCache, RotarySpec, TokenCosSin, apply_rotary
from antiphon.kernels.upload import upload_to
from antiphon.layers.attention import AttentionSpec
from antiphon.layers.context import (
    AttentionBackend,
    AttentionParams,
    AttentionRows,
    CrossAttentionBackend,
    ForwardContext,
    HiddenStates,
    LatentAttentionBackend,
    LatentAttentionParams,
    LocalExperts,
    SummedExperts,
)
from antiphon.layers.mla import LatentSpec
from antiphon.model_worker.model.decoder_layer import NotStackable
from antiphon.model_worker.model.draft_head import DraftHead
from antiphon.model_worker.runner.alignment import attend_to_prompt
from antiphon.model_worker.runner.input_batch import InputBatch, PlanRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from antiphon.kernels.cpu.fused_decoder import FusedDecoder
    from antiphon.kernels.ops import Ops
    from antiphon.kernels.recurrent import Recurrence, StateMetadata
    from antiphon.model_worker.batching.plan import Ints, StepPlan
    from antiphon.model_worker.model.decoder_layer import PositionSpec
    from antiphon.model_worker.model.load import LoadedModel
    from antiphon.model_worker.runner.cross_cache import CrossCache
    from antiphon.model_worker.runner.pools import KvPool, StatePool

    Angles = Callable[[RotarySpec | None], TokenCosSin]
    """Cosine and sine of a RoPE variant at the positions of a pass."""
    RunLayers = Callable[[StepPlan, InputBatch, Tensor], tuple[ForwardContext, HiddenStates]]
    """The context of a forward pass on tokens (T,) int64, and its hidden states."""

STACK = "decoder.stack"
"""The name under which the kernel table lists the fused decoder or the layer-by-layer one."""
BY_LAYER = "by layer"
_STACKED = frozenset(
    {
        *("norm.rmsnorm", "norm.add_rmsnorm", "norm.rmsnorm_wide", "norm.layernorm"),
        *("activation.silu_mul", "activation.gate", "activation.plain", "logits.softcap"),
        *("attention.heads", "attention.paged", "attention.whole"),
        *("activation.sigmoid_mul", "recurrent.layer"),
    }
)
"""Operations whose bits the fused decoder has."""


class ForwardContexts:
    """Makes the context of each forward pass of one model on one rank.

    `fused=False` runs the layers one by one where they could be one call; `deterministic` leaves
    out what makes the bits of a token depend on the rest of the batch. Passes output the residual
    stream as it enters each of `aux_layers`, too.
    """

    def __init__(
        self,
        model: LoadedModel,
        ops: Ops,
        pools: tuple[KvPool, ...],
        states: tuple[StatePool, ...] = (),
        *,
        fused: bool,
        deterministic: bool = False,
        aux_layers: tuple[int, ...] = (),
        cross: CrossCache | None = None,
    ) -> None:
        self._cross = cross
        placement = model.build
        self._decoder = model.decoder
        self._ops = ops
        self._tp, self._mixing_tp = placement.tp, placement.of_mixers.tp
        alone = placement.tp.ranks == 1
        self._experts = LocalExperts() if alone else SummedExperts(placement.tp)
        self._caches = {
            layer: LayerKvCache(index, *pool.layer(place), model.kv_scales.get(layer, UNSCALED))
            for index, pool in enumerate(pools)
            for place, layer in enumerate(pool.group.layers)
        }
        self._states = {
            layer: LayerStates(index, *pool.layer(place))
            for index, pool in enumerate(states)
            for place, layer in enumerate(pool.group.layers)
        }
        kinds = [cache for cache, _ in model.spec.cache_groups()]
        self._latent = {i: kind for i, kind in enumerate(kinds) if isinstance(kind, LatentSizes)}
        self._causal = model.spec.causal
        self._texts, self._uncached = _whole_texts(model)
        self._absorbs = deterministic or placement.device_kind != "cpu"
        self.aux_layers = aux_layers
        self._upload = upload_to(placement.device_kind, placement.device)
        self._angles = cache(
            partial(
                CosSinCache, dtype=placement.dtype, device=placement.device, upload=self._upload
            )
        )
        mixers = (mixer for layer in model.spec.layers for mixer in layer.mixers)
        self._rotaries = {m.rotary for m in mixers if isinstance(m, AttentionSpec | LatentSpec)}
        self._stack: FusedDecoder | None = None
        self._stack_positions: tuple[PositionSpec, ...] = ()
        # With chunked attention, the rows of a sequence may differ from step to step.
        self._may_continue = not any(isinstance(kind, KvSpec) and kind.chunked for kind in kinds)
        # (R,) lengths and position offsets of a decode step that the fused decoder can continue.
        self._before: tuple[Ints, Ints | None] | None = None
        self.choice = self._choose(model, fused=fused)

    def _choose(self, model: LoadedModel, *, fused: bool) -> BackendChoice[..., object]:
        decoder = model.decoder
        try:
            _refuse_apart(self._ops, model, fused=fused)
            caches = {**self._caches, **self._uncached}
            self._stack, self._stack_positions = decoder.stack(
                caches, self._states, self.aux_layers
            )
        except NotStackable as error:
            refused = (("cpu", str(error)),)
            # It is batch-invariant if its operations are.
            return BackendChoice(STACK, self.run_layers, BY_LAYER, refused, invariant=True)
        return BackendChoice(STACK, self._stack, "cpu", (), invariant=True)

    def prepare(self, positions: int) -> None:
        """Compute now what passes read of so many positions."""
        for rotary in self._rotaries:
            self._angles(rotary).reach(positions - 1)

    def score(
        self, plan: StepPlan, batch: InputBatch, tokens: Ints, *, bare: bool
    ) -> FusedDecoderOutput | None:
        """Run a pass as one call from `tokens` (T,) to logits; None where it is not supported.

        A `bare` result may be without logits.
        """
        stack, before = self._stack, self._before
        self._before = None  # set again on success
        if stack is None or plan.spliced is not None or not self._absorbed(batch):
            return None
        if plan.axis_tokens is not None:  # the next step would go on from these positions
            return None
        scored = None
        if before is not None and batch.decodes and _goes_on(before, plan):
            scored = stack.decode_next(tokens, plan.page_tables, bare)
        if scored is None:
            if not stack.scores or plan.pooling is not None:
                return None
            turns = self._turns(batch.rotary_positions)
            scored = stack.score(
                tokens, plan.logit_tokens, turns, batch.groups, batch.states, argmax_only=bare
            )
        if self._may_continue and batch.decodes:
            self._before = plan.kv_len, plan.position_offsets
        return scored

    def _absorbed(self, batch: InputBatch) -> bool:
        """Whether latents are nowhere expanded, which only single operations do."""
        if batch.decodes or self._absorbs:
            return True
        parts = (
            part
            for index, sizes in self._latent.items()
            for part in LatentMetadata(batch.groups[index], sizes).parts
        )
        return all(part.places is None for part in parts)

    def forget(self) -> None:
        """After a failed pass: the next one does not continue from it."""
        self._before = None

    def run_layers(
        self, plan: StepPlan, batch: InputBatch, token_ids: Tensor
    ) -> tuple[ForwardContext, HiddenStates]:
        """The context of a forward pass on tokens (T,) int64, and its hidden states."""
        decoder, ctx = self._decoder, self.of(plan, batch)
        assert not isinstance(decoder, DraftHead), "its layer reads more than tokens"
        return ctx, decoder.forward(ctx, token_ids, self.splices(plan))

    def run_alone(self, tokens: Ints, cross: CrossAttentionBackend) -> None:
        """Run the layers on a whole prompt (P,) by itself, without a cache of its keys and values.

        It attends to what `cross` has.
        """
        decoder = self._decoder
        assert not isinstance(decoder, DraftHead), "its layer reads more than tokens"
        ctx = ForwardContext(
            ops=self._ops,
            tp=self._mixing_tp,
            experts=self._experts,
            attend=attend_to_prompt,
            cross=cross,
            positions=self._upload(np.arange(len(tokens), dtype=np.int32)),
        )
        decoder.forward(ctx, self._upload(tokens.astype(np.int64)))

    def splices(self, plan: StepPlan) -> tuple[Tensor, Tensor] | None:
        """What `Decoder.forward` takes of a plan; None: all tokens are read from the table."""
        if plan.spliced is None or plan.spliced_rows is None:
            return None
        return self._upload(plan.spliced.astype(np.int64)), self._upload(plan.spliced_rows)

    def score_by_layer(
        self,
        plan: StepPlan,
        batch: InputBatch,
        token_ids: Tensor,
        run_layers: RunLayers | None = None,
    ) -> FusedDecoderOutput:
        """`score` in several calls. Only requested rows get logits, since the head is wide."""
        ctx, (hidden, finite, aux) = (run_layers or self.run_layers)(plan, batch, token_ids)
        wanted = hidden
        if len(plan.logit_tokens) < len(hidden):
            wanted = hidden.index_select(0, self._upload(plan.logit_tokens))
        logits = self._decoder.logits(ctx, wanted)
        return FusedDecoderOutput(hidden, finite, logits, self._ops.finite_rows(logits), None, aux)

    def of(self, plan: StepPlan, batch: InputBatch) -> ForwardContext:
        own = batch.own
        if own is batch:
            return self._of(plan, batch)
        ctx = self._of(own.plan, own) if len(own.plan.slot) else None
        return ForwardContext(
            ops=self._ops,
            tp=self._tp,
            experts=self._experts,
            attend=_refuse_all,
            positions=self._upload(batch.positions),
            attention=AttentionRows(batch.own_tokens, ctx),
        )

    def _of(self, plan: StepPlan, batch: InputBatch) -> ForwardContext:
        """The context of tokens that have their pages here."""
        positions, states = batch.rotary_positions, batch.states

        @cache
        def angles(rotary: RotarySpec | None) -> TokenCosSin:
            return self._angles(rotary).at_positions(positions)

        fused = None
        if self._stack is not None and batch.images is None and self._absorbed(batch):
            groups = batch.groups if self._causal else self._whole_rows(plan)
            turns = self._turns(positions)
            fused = partial(self._stack, turns=turns, groups=groups, states=states)
        return ForwardContext(
            ops=self._ops,
            tp=self._mixing_tp,
            experts=self._experts,
            attend=self._attend(plan, batch, angles),
            recur=partial(_recurrence, self._ops, self._states, states) if states else None,
            attend_latent=self._attend_latent(batch.groups, angles) if self._latent else None,
            cross=None if self._cross is None else self._cross.of(self._ops, plan, batch.token_row),
            positions=self._upload(batch.positions),
            token_types=None if plan.token_types is None else self._upload(plan.token_types),
            fused=fused,
            aux_layers=self.aux_layers,
        )

    def decoding(
        self, groups: tuple[AttentionMetadata, ...], positions: Tensor, rotary: Tensor
    ) -> ForwardContext:
        """The context of a decode step whose rows are on the device; positions, rotary (R,)."""

        @cache
        def angles(spec: RotarySpec | None) -> TokenCosSin:
            return self._angles(spec).at(rotary)

        return ForwardContext(
            ops=self._ops,
            tp=self._tp,
            experts=self._experts,
            attend=partial(_paged_attention, self._ops, self._caches, groups, angles),
            attend_latent=self._attend_latent(groups, angles) if self._latent else None,
            positions=positions,
        )

    def _turns(self, positions: NDArray[np.int32]) -> list[TokenCosSin]:
        """What the layers of the fused decoder have of the positions of a pass."""
        return [
            self._angles(rotary, temperature=temperature).at_positions(positions)
            for rotary, temperature in self._stack_positions
        ]

    def _whole_rows(self, plan: StepPlan) -> tuple[AttentionMetadata, ...]:
        """The rows as each kind of bidirectional layers sees them."""
        return tuple(AttentionMetadata.of_texts(shape, plan.query_len) for shape in self._texts)

    def _attend(self, plan: StepPlan, batch: InputBatch, angles: Angles) -> AttentionBackend:
        if self._causal:
            attend = partial(_paged_attention, self._ops, self._caches, batch.groups, angles)
            if batch.images is None:
                return attend
            return partial(attend, images=batch.images)
        if (plan.query_len != plan.kv_len).any():
            raise PlanRefused(
                f"step {plan.step}: bidirectional attention needs the whole text in one pass"
            )
        texts = TextRows(plan.query_len.tolist(), self._upload)
        return partial(_bidirectional_attention, self._ops, texts, angles)

    def _attend_latent(
        self, groups: Sequence[AttentionMetadata], angles: Angles
    ) -> LatentAttentionBackend:
        rows = {
            index: LatentMetadata(groups[index], sizes, absorbed=self._absorbs)
            for index, sizes in self._latent.items()
        }
        return partial(_paged_latent_attention, self._ops, self._caches, rows, angles)


def _goes_on(before: tuple[Ints, Ints | None], plan: StepPlan) -> bool:
    """Whether a plan has as many rows, each of one token more, which has the position after."""
    (lengths, offsets), kv_len = before, plan.kv_len
    if len(lengths) != len(kv_len) or len((kv_len - lengths != 1).nonzero()[0]):
        return False
    if offsets is None or plan.position_offsets is None:
        return offsets is plan.position_offsets
    return np.array_equal(offsets, plan.position_offsets)


# The backends of a `ForwardContext`, which binds their first arguments to those of one pass.


def _refuse_all(layer: int, heads: Tensor, params: AttentionParams) -> Tensor:
    raise AssertionError("each attention group attends to its own tokens, in their own context")


def _paged_attention(
    ops: Ops,
    caches: Mapping[int, LayerKvCache],
    groups: tuple[AttentionMetadata, ...],
    angles: Angles,
    layer: int,
    heads: Tensor,
    params: AttentionParams,
    images: tuple[ImageRows, ...] = (),
) -> Tensor:
    """Attention of a pass; that of tokens of `images` is computed again by the reference.

    The kernels read no row that is bidirectional and has tokens in the cache, and few passes have
    images. All other tokens have the bits that they have in other passes.
    """
    cache = caches[layer if params.kv_layer is None else params.kv_layer]
    rows = groups[cache.group]
    cos, sin = angles(params.rotary).by_token
    keys, values, scales = cache.keys, cache.values, cache.scales
    if params.kv_layer is None:
        q = ops.qk_norm_rope_store(
            heads, cos, sin, keys, values, rows.slot_mapping, params.norms, scales
        )
    else:
        q = apply_rotary(heads, cos, sin)
    beside = params.scale, scales, params.softcap, params.sinks
    attended = ops.paged_attention(q, keys, values, rows, *beside)
    if images and params.image_ahead:
        tokens, own = images[cache.group].tokens, images[cache.group].rows
        seen = paged_attention.reference(q.index_select(0, tokens), keys, values, own, *beside)
        attended.index_copy_(0, tokens, seen)
    return attended


def _bidirectional_attention(
    ops: Ops, texts: TextRows, angles: Angles, _: int, heads: Tensor, params: AttentionParams
) -> Tensor:
    """The same for all layers: all tokens of a row are in the pass, and nothing is cached."""
    keys = heads.shape[1] - 2 * params.kv_heads
    values = keys + params.kv_heads
    cos, sin = angles(params.rotary).by_token
    rotated = apply_rotary(heads[:, :values], cos, sin)
    q, k, v = rotated[:, :keys], rotated[:, keys:], heads[:, values:]
    return ops.bidirectional_attention(q, k, v, texts, params.scale, params.window)


def _paged_latent_attention(
    ops: Ops,
    caches: Mapping[int, LayerKvCache],
    groups: Mapping[int, LatentMetadata],
    angles: Angles,
    layer: int,
    q: Tensor,
    latents: Tensor,
    params: LatentAttentionParams,
) -> Tensor:
    cache = caches[layer]
    rows = groups[cache.group]
    cos, sin = angles(params.rotary).by_token
    ops.store_latents(latents, cos, sin, cache.keys, rows.rows.slot_mapping, cache.scales.key)
    content, turned = q[..., : rows.sizes.content], q[..., rows.sizes.content :]
    q = torch.cat((content, apply_rotary(turned, cos, sin)), dim=-1)
    return latent_attention(q, cache, rows, params.heads, params.scale, ops)


def _recurrence(
    ops: Ops,
    layers: Mapping[int, LayerStates],
    groups: tuple[StateMetadata, ...],
    layer: int,
    projected: Tensor,
    recurrence: Recurrence,
) -> Tensor:
    states = layers[layer]
    return ops.recurrence(projected, recurrence, states, groups[states.group])


def _whole_texts(model: LoadedModel) -> tuple[tuple[KvShape, ...], dict[int, UncachedHeads]]:
    """The shapes of bidirectional layers, and of each layer which one it has, and its heads."""
    ranks, shapes, layers = model.build.tp.ranks, list[KvShape](), dict[int, UncachedHeads]()
    for index, layer in enumerate(model.spec.layers):
        mixer = layer.mixer
        if not isinstance(mixer, AttentionSpec) or mixer.causal:
            continue
        heads = max(1, mixer.kv_heads // ranks)
        shape = KvShape(
            page_tokens=PASS_PAGE_TOKENS,
            heads=heads,
            queries_per_head=mixer.query_heads // ranks // heads,
            head_size=mixer.head_size,
            dtype=model.build.dtype,
            window=mixer.window,
            bidirectional=True,
        )
        if shape not in shapes:
            shapes.append(shape)
        layers[index] = UncachedHeads(shapes.index(shape), heads, mixer.head_size)
    return tuple(shapes), layers


def _refuse_apart(ops: Ops, model: LoadedModel, *, fused: bool) -> None:
    if not fused:
        raise NotStackable("the fused decoder is disabled")
    if model.build.attention is not None:
        raise NotStackable("groups of ranks attend to different requests")
    for choice in ops.choices:
        if choice.op in _STACKED & model.decoder.operations and choice.backend != "cpu":
            raise NotStackable(f"{choice.op} runs on {choice.backend}")
