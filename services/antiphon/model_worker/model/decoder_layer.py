"""A layer of the decoder: what mixes tokens, what transforms each, and what is around both.

Axes: T tokens.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from antiphon.kernels.cpu.fused_decoder import (
    UNIT_SCALES,
    BlockNorms,
    FusedDecoderLayer,
    FusedRecurrence,
    MixerScales,
)
from antiphon.layers.alternating_updates import AlternatingUpdates
from antiphon.layers.attention import Attention, AttentionSpec
from antiphon.layers.cross_attention import CrossAttention
from antiphon.layers.laurel import Laurel
from antiphon.layers.mla import LatentAttention, LatentSpec
from antiphon.layers.mlp import GatedMlp, GatedMlpSpec, PlainMlp, PlainMlpSpec
from antiphon.layers.moe import MixtureOfExperts, MoeSpec
from antiphon.layers.parallel_mixers import ParallelMixers, ParallelMixersSpec
from antiphon.layers.per_layer_embedding import PerLayerInput
from antiphon.layers.recurrent import GatedDelta, GatedDeltaSpec, Mamba2, Mamba2Spec, RecurrentMixer
from antiphon.layers.weights import Module, WeightSource, replicated_source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from antiphon.kernels.activation import ActivationKind
    from antiphon.kernels.recurrent import LayerStates
    from antiphon.kernels.rotary import RotarySpec, Temperature
    from antiphon.layers.context import ForwardContext
    from antiphon.layers.norm import Norm
    from antiphon.layers.sublayer import LayerBuildContext, Sublayer
    from antiphon.model_worker.model.spec import FeedForwardSpec, LayerSpec, MixerSpec

    PositionSpec = tuple[RotarySpec | None, Temperature | None]
    """The RoPE of a layer, and the temperature of its queries."""

SUBLAYERS: Mapping[type, Callable[..., Sublayer]] = {
    AttentionSpec: Attention,
    LatentSpec: LatentAttention,
    Mamba2Spec: Mamba2,
    GatedDeltaSpec: GatedDelta,
    GatedMlpSpec: GatedMlp,
    PlainMlpSpec: PlainMlp,
    MoeSpec: MixtureOfExperts,
}
"""The kinds of mixers and feed-forward blocks: the spec of each, and the block that computes it."""


class NotStackable(Exception):
    """These layers cannot be fused into one call; the message names the reason."""


class DecoderLayer(Module):
    """A mixer followed by a feed-forward block, or both in parallel."""

    def __init__(self, site: LayerBuildContext, spec: LayerSpec) -> None:
        self._multiplier = spec.multiplier
        self._norm_kernel = spec.norm.kernel
        self._parallel = spec.parallel
        own = replace(site, build=site.build.of_mixers)
        self._mixer = build_sublayer(own, spec.mixer)
        self._cross = None if spec.cross is None else CrossAttention(own, spec.cross)
        self._feed_forward = None
        if spec.feed_forward is not None:
            self._feed_forward = build_sublayer(site, spec.feed_forward)
        self._second = None if spec.second is None else build_sublayer(site, spec.second)
        self._norms: dict[str, Norm] = {
            place: site.norm(spec.norm, name, site.hidden)
            for place, name in msgspec.structs.asdict(spec.norms).items()
            if name is not None
        }
        self._input = None
        if spec.per_layer_input is not None:
            self._input = PerLayerInput(site, spec.per_layer_input)
        self._laurel = None if spec.laurel is None else Laurel(site, spec.laurel)
        self._updates = None if spec.updates is None else AlternatingUpdates(site, spec.updates)
        blocks = (self._mixer, self._cross, self._feed_forward, self._second)
        beside = (self._input, self._laurel, self._updates)
        self.children = (*self._norms.values(), *blocks, *beside)
        self._scalar, self._scalar_name = None, site.tensor_name(spec.scalar or "")
        if spec.scalar is not None:
            self._scalar = site.build.empty(1)

    def __call__(
        self,
        ctx: ForwardContext,
        pending: Tensor | None,
        residual: Tensor,
        own: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """Run the layer. `pending` is a block output that is not yet added to the residual stream.

        The norm that reads it adds it, which saves a pass over memory for each block. A layer with
        post-norms of the residual stream returns no pending output, nor does one that reads an
        input of its `own`, (T, P), or multiplies the stream. With alternating updates, `residual`
        is all streams (S, T, hidden).
        """
        if self._updates is not None:
            assert own is not None, "a layer with an input of its own"
            assert pending is None, "streams are behind a layer as soon as it has run"
            return None, self._updates(ctx, residual, own, partial(self._run_alone, ctx))
        pending, residual = self._run_blocks(ctx, pending, residual)
        if self._input is None and self._scalar is None:
            return pending, residual
        if pending is not None:
            residual = residual + pending
        if self._input is not None:
            assert own is not None, "a layer with an input of its own"
            residual = residual + self._input(ctx, residual, own)
        return None, residual if self._scalar is None else residual * self._scalar

    def sources(self) -> Iterator[WeightSource]:
        yield from super().sources()
        if self._scalar is not None:
            yield from replicated_source(self._scalar_name, self._scalar)

    def _run_alone(self, ctx: ForwardContext, residual: Tensor) -> Tensor:
        """The stream behind the blocks, of the one before them, both (T, hidden)."""
        pending, residual = self._run_blocks(ctx, None, residual)
        return residual if pending is None else residual + pending

    def _run_blocks(
        self, ctx: ForwardContext, pending: Tensor | None, residual: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        norm = self._norms.get
        entered, residual = enter_block(ctx, norm("before_mixer"), pending, residual)
        mixed = self._leave(ctx, norm("after_mixer"), ctx.mix(self._mixer, entered))
        mixed, residual = _join(ctx, norm("with_mixer"), mixed, residual)
        if self._laurel is not None:
            assert mixed is not None, "what was mixed is added here"
            mixed, residual = None, self._laurel(ctx, entered, residual + mixed)
        if self._cross is not None:
            entered, residual = enter_block(ctx, norm("before_cross"), mixed, residual)
            mixed = ctx.mix(self._cross, entered)
        if self._feed_forward is None:
            return mixed, residual
        if self._parallel:
            if (own_norm := norm("before_feed_forward")) is not None:
                entered = own_norm(ctx, residual)
            beside = self._feed_forward(ctx, entered)
            assert mixed is not None, "parallel blocks are added to the stream together"
            return mixed + self._leave(ctx, norm("after_feed_forward"), beside), residual
        entered, residual = enter_block(ctx, norm("before_feed_forward"), mixed, residual)
        transformed = self._feed_forward(ctx, entered)
        if self._second is not None:
            second = _normed(ctx, norm("after_second"), self._second(ctx, residual))
            transformed = _normed(ctx, norm("after_first"), transformed) + second
        transformed = self._leave(ctx, norm("after_feed_forward"), transformed)
        return _join(ctx, norm("with_feed_forward"), transformed, residual)

    def stacked(
        self, rotaries: dict[PositionSpec, int], states: LayerStates | None
    ) -> FusedDecoderLayer:
        """This layer in the form that the fused decoder takes; its RoPE has an index there."""
        if self._updates is not None:
            raise NotStackable("the fused decoder has one residual stream")
        if self._cross is not None:
            raise NotStackable("the fused decoder has no cross attention")
        if self._second is not None:
            raise NotStackable("the fused decoder has no second feed-forward block")
        if self._input is not None or self._scalar is not None:
            raise NotStackable("the fused decoder has no per-layer inputs, and scales no stream")
        if self._laurel is not None:
            raise NotStackable("the fused decoder has no learned residual beside a mixer")
        gate_up = down = experts = None
        activation: ActivationKind = "silu"
        scales = 1.0, 1.0
        match feed_forward := self._feed_forward:
            case MixtureOfExperts():
                experts = feed_forward.packed
            case GatedMlp() | PlainMlp():
                gate_up, down = feed_forward.packed or (None, None)
                activation = feed_forward.activation
                if isinstance(feed_forward, GatedMlp):
                    if feed_forward.sparse:
                        raise NotStackable("the fused decoder has no sparse gates")
                    scales = feed_forward.scales
            case _:
                raise NotStackable("the fused decoder has no such feed-forward block")
        if experts is None and down is None:
            raise NotStackable(_NOT_PACKED)
        layer = FusedDecoderLayer(
            qkv=None,
            out=None,
            gate_up=gate_up,
            down=down,
            activation=activation,
            attention_norms=self._norms_around("mixer"),
            mlp_norms=self._norms_around("feed_forward"),
            head_norms=None,
            scale=1.0,
            experts=experts,
            parallel=self._parallel,
            multiplier=self._multiplier,
            mlp_scales=scales,
        )
        if isinstance(self._mixer, LatentAttention):
            if self._mixer.norm_kernel != self._norm_kernel:
                raise NotStackable("the norms differ between layers")
            return _with_latent(layer, self._mixer, rotaries)
        attention, factors, recurrence = _mixers(self._mixer, states)
        layer = replace(layer, attention_scales=factors, recurrence=recurrence)
        return layer if attention is None else _with_attention(layer, attention, rotaries)

    def _norms_around(self, block: str) -> BlockNorms:
        norms = [self._norms.get(f"{place}_{block}") for place in ("before", "after", "with")]
        if any(norm is not None and norm.weights is None for norm in norms):
            raise NotStackable("a norm without weights has no kernel")
        return BlockNorms(*(norm and norm.weights for norm in norms))

    def _leave(self, ctx: ForwardContext, norm: Norm | None, x: Tensor) -> Tensor:
        """The output of a block as it is added to the stream: normalised and multiplied."""
        x = _normed(ctx, norm, x)
        return x if self._multiplier == 1.0 else x * self._multiplier


def build_sublayer(site: LayerBuildContext, spec: MixerSpec | FeedForwardSpec) -> Sublayer:
    if isinstance(spec, ParallelMixersSpec):
        return ParallelMixers(site, spec, build_sublayer)
    return SUBLAYERS[type(spec)](site, spec)


def enter_block(
    ctx: ForwardContext, norm: Norm | None, pending: Tensor | None, residual: Tensor
) -> tuple[Tensor, Tensor]:
    """The input of a block, and the stream with the pending output added."""
    if norm is not None and pending is not None:
        return norm.add(ctx, pending, residual)
    if pending is not None:
        residual = residual + pending
    return (residual if norm is None else norm(ctx, residual)), residual


_NOT_PACKED = "the linears are not packed on a single rank"


def _with_attention(
    layer: FusedDecoderLayer, attention: Attention, rotaries: dict[PositionSpec, int]
) -> FusedDecoderLayer:
    if attention.packed is None:
        raise NotStackable(_NOT_PACKED)
    qkv, out = attention.packed
    params, position = attention.params, (attention.params.rotary, attention.temperature)
    return replace(
        layer,
        qkv=qkv,
        out=out,
        head_norms=attention.head_norms,
        scale=params.scale,
        softcap=params.softcap,
        sinks=params.sinks,
        rotary=rotaries.setdefault(position, len(rotaries)),
        gated=attention.gated,
    )


def _with_latent(
    layer: FusedDecoderLayer, attention: LatentAttention, rotaries: dict[PositionSpec, int]
) -> FusedDecoderLayer:
    if attention.packed is None:
        raise NotStackable(_NOT_PACKED)
    latent, out = attention.packed
    position = attention.params.rotary, None
    return replace(
        layer,
        out=out,
        latent=latent,
        scale=attention.params.scale,
        rotary=rotaries.setdefault(position, len(rotaries)),
    )


def _mixers(
    mixer: Sublayer, states: LayerStates | None
) -> tuple[Attention | None, MixerScales, FusedRecurrence | None]:
    """The attention of a layer, factors around it, and its recurrence, as far as it has them."""
    branches = [(UNIT_SCALES, mixer)]
    if isinstance(mixer, ParallelMixers):
        branches = [
            (MixerScales(branch.scale_in, branch.scale_out), block)
            for branch, block in mixer.branches
        ]
    attention: Attention | None = None
    attention_scales, recurrence = UNIT_SCALES, None
    for scales, block in branches:
        match block:
            case Attention() if attention is None:
                if block.unfused is not None:
                    raise NotStackable(f"the fused decoder has no {block.unfused}")
                attention, attention_scales = block, scales
            case RecurrentMixer() if recurrence is None:
                if block.packed is None:
                    raise NotStackable(_NOT_PACKED)
                assert states is not None, "a recurrent layer has states"
                recurrence = FusedRecurrence(
                    block.recurrence.compiled, *block.packed, states, scales
                )
            case _:
                raise NotStackable(f"the fused decoder has no {type(block).__name__}")
    return attention, attention_scales, recurrence


def _normed(ctx: ForwardContext, norm: Norm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(ctx, x)


def _join(
    ctx: ForwardContext, norm: Norm | None, x: Tensor, residual: Tensor
) -> tuple[Tensor | None, Tensor]:
    """The pending output and the stream after a block gave x; a post-norm of the stream adds x."""
    if norm is None:
        return x, residual
    joined, _ = norm.add(ctx, x, residual)
    return None, joined
