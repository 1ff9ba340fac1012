"""A layer of the decoder: mixer, feed-forward block, norms and residual connections."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.kernels.cpu.fused_decoder import FusedDecoderLayer
from antiphon.layers.attention import Attention, AttentionSpec
from antiphon.layers.gated_delta import GatedDelta, GatedDeltaSpec
from antiphon.layers.mamba2 import Mamba2, Mamba2Spec
from antiphon.layers.mla import LatentAttention, LatentSpec
from antiphon.layers.mlp import GatedMlp, GatedMlpSpec, PlainMlp, PlainMlpSpec
from antiphon.layers.moe import MixtureOfExperts, MoeSpec
from antiphon.layers.norm import Norm, RmsNorm, build_norm
from antiphon.layers.parallel_mixers import ParallelMixers, ParallelMixersSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from antiphon.layers.context import ForwardContext
    from antiphon.layers.sublayer import LayerBuildContext, Sublayer
    from antiphon.layers.weights import WeightSource
    from antiphon.model_worker.model.spec import FeedForwardSpec, LayerSpec, MixerSpec


# One line for each kind: its spec, and the block that computes it.
MIXERS: Mapping[type, Callable[..., Sublayer]] = {
    AttentionSpec: Attention,
    Mamba2Spec: Mamba2,
    GatedDeltaSpec: GatedDelta,
    LatentSpec: LatentAttention,
}
FEED_FORWARDS: Mapping[type, Callable[..., Sublayer]] = {
    GatedMlpSpec: GatedMlp,
    PlainMlpSpec: PlainMlp,
    MoeSpec: MixtureOfExperts,
}


def mixer_of(site: LayerBuildContext, spec: MixerSpec) -> Sublayer:
    if isinstance(spec, ParallelMixersSpec):
        return ParallelMixers(site, spec, mixer_of)
    return MIXERS[type(spec)](site, spec)


def feed_forward_of(site: LayerBuildContext, spec: FeedForwardSpec) -> Sublayer:
    return FEED_FORWARDS[type(spec)](site, spec)


class NotStackable(Exception):
    """These layers cannot be fused into one call; the message names the reason."""


class DecoderLayer:
    """A mixer followed by a feed-forward block, or both in parallel."""

    def __init__(self, site: LayerBuildContext, spec: LayerSpec) -> None:
        self._multiplier = spec.multiplier
        self._parallel = spec.parallel
        self._mixer = mixer_of(site, spec.mixer)
        self._feed_forward = None
        if spec.feed_forward is not None:
            self._feed_forward = feed_forward_of(site, spec.feed_forward)

        def norm(name: str | None) -> Norm | None:
            if name is None:
                return None
            return build_norm(spec.norm, site.tensor_name(name), site.hidden, site.build)

        norms = spec.norms
        self._before_mixer = norm(norms.before_mixer)
        self._after_mixer = norm(norms.after_mixer)
        self._before_feed_forward = norm(norms.before_feed_forward)
        self._after_feed_forward = norm(norms.after_feed_forward)
        self._with_mixer = norm(norms.with_mixer)
        self._with_feed_forward = norm(norms.with_feed_forward)

    @property
    def operations(self) -> frozenset[str]:
        parts = (*self._parts(), *self._norms())
        return frozenset[str]().union(*(part.operations for part in parts))

    def __call__(
        self, ctx: ForwardContext, pending: Tensor | None, residual: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        """Run the layer. `pending` is a block output that is not yet added to the residual stream.

        The norm that reads it adds it, which saves a pass over memory for each block. A layer with
        post-norms of the residual stream returns no pending output.
        """
        entered, residual = _enter(ctx, self._before_mixer, pending, residual)
        mixed = self._leave(ctx, self._after_mixer, self._mixer(ctx, entered))
        mixed, residual = _join(ctx, self._with_mixer, mixed, residual)
        if self._feed_forward is None:
            return mixed, residual
        if self._parallel:
            if self._before_feed_forward is not None:
                entered = self._before_feed_forward(ctx, residual)
            beside = self._feed_forward(ctx, entered)
            assert mixed is not None, "parallel blocks are added to the stream together"
            return mixed + self._leave(ctx, self._after_feed_forward, beside), residual
        entered, residual = _enter(ctx, self._before_feed_forward, mixed, residual)
        transformed = self._leave(ctx, self._after_feed_forward, self._feed_forward(ctx, entered))
        return _join(ctx, self._with_feed_forward, transformed, residual)

    def stacked(self) -> FusedDecoderLayer:
        """This layer in the form that the fused decoder takes."""
        mixer, feed_forward = self._mixer, self._feed_forward
        before, between = self._before_mixer, self._before_feed_forward
        other = self._parallel or self._multiplier != 1.0 or len(self._norms()) != 2
        if other or not isinstance(before, RmsNorm) or not isinstance(between, RmsNorm):
            raise NotStackable("the residual connections differ from Llama's")
        if not isinstance(mixer, Attention) or not mixer.fusable:
            raise NotStackable("the mixers differ from Llama's attention")
        if not isinstance(feed_forward, GatedMlp) or not feed_forward.fusable:
            raise NotStackable("the feed-forward blocks differ from Llama's")
        if mixer.packed is None or feed_forward.packed is None:
            raise NotStackable("the linears are not packed on a single rank")
        return FusedDecoderLayer(
            qkv=mixer.packed[0],
            out=mixer.packed[1],
            gate_up=feed_forward.packed[0],
            down=feed_forward.packed[1],
            attention_norm=before.weight,
            mlp_norm=between.weight,
            head_norms=mixer.params.norms,
        )

    def sources(self) -> Iterator[WeightSource]:
        for part in (*self._norms(), *self._parts()):
            yield from part.sources()

    def pack(self) -> None:
        for part in self._parts():
            part.pack()

    def _leave(self, ctx: ForwardContext, norm: Norm | None, x: Tensor) -> Tensor:
        """The output of a block as it is added to the stream: normalised and multiplied."""
        if norm is not None:
            x = norm(ctx, x)
        return x if self._multiplier == 1.0 else x * self._multiplier

    def _parts(self) -> tuple[Sublayer, ...]:
        own = (self._mixer, self._feed_forward)
        return tuple(part for part in own if part is not None)

    def _norms(self) -> tuple[Norm, ...]:
        norms = (
            self._before_mixer,
            self._before_feed_forward,
            self._after_mixer,
            self._after_feed_forward,
            self._with_mixer,
            self._with_feed_forward,
        )
        return tuple(norm for norm in norms if norm is not None)


def _enter(
    ctx: ForwardContext, norm: Norm | None, pending: Tensor | None, residual: Tensor
) -> tuple[Tensor, Tensor]:
    """The input of a block, and the stream with the pending output added."""
    if norm is not None and pending is not None:
        return norm.add(ctx, pending, residual)
    if pending is not None:
        residual = residual + pending
    return (residual if norm is None else norm(ctx, residual)), residual


def _join(
    ctx: ForwardContext, norm: Norm | None, x: Tensor, residual: Tensor
) -> tuple[Tensor | None, Tensor]:
    """The pending output and the stream after a block gave x; a post-norm of the stream adds x."""
    if norm is None:
        return x, residual
    joined, _ = norm.add(ctx, x, residual)
    return None, joined
