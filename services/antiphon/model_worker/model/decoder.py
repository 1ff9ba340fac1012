"""The decoder of all families; what differs between them is in the `ModelSpec`.

Axes: T tokens, L tokens whose logits are requested, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch

from antiphon.kernels.cpu.fused_decoder import (
    UNIT_SCALES,
    BlockNorms,
    EmbeddingAndHead,
    FusedDecoder,
    FusedDecoderLayer,
    FusedRecurrence,
    MixerScales,
    UncachedHeads,
)
from antiphon.layers.alternating_updates import AlternatingUpdates, Streams
from antiphon.layers.attention import Attention, AttentionSpec
from antiphon.layers.classification_head import ClassificationHead, ClassificationHeadSpec
from antiphon.layers.context import HiddenStates
from antiphon.layers.cross_attention import CrossAttention
from antiphon.layers.embedding import AddedEmbedding, VocabParallelEmbedding
from antiphon.layers.laurel import Laurel
from antiphon.layers.methods import LinearMethod
from antiphon.layers.mla import LatentAttention, LatentSpec
from antiphon.layers.mlp import GatedMlp, GatedMlpSpec, PlainMlp, PlainMlpSpec
from antiphon.layers.moe import MixtureOfExperts, MoeSpec
from antiphon.layers.norm import Norm, build_norm
from antiphon.layers.parallel_mixers import ParallelMixers, ParallelMixersSpec
from antiphon.layers.per_layer_embedding import PerLayerEmbedding, PerLayerInput
from antiphon.layers.recurrent import GatedDelta, GatedDeltaSpec, Mamba2, Mamba2Spec, RecurrentMixer
from antiphon.layers.sublayer import LayerBuildContext, Sublayer
from antiphon.layers.weights import BuildContext, Module, WeightSource, replicated_source
from antiphon.model_worker.model.spec import (
    FeedForwardSpec,
    HeadSpec,
    LayerSpec,
    MixerSpec,
    ModelSpec,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from antiphon.kernels.activation import ActivationKind
    from antiphon.kernels.kv import LayerKvCache
    from antiphon.kernels.recurrent import LayerStates
    from antiphon.kernels.rotary import RotarySpec, Temperature
    from antiphon.layers.context import ForwardContext

    PositionSpec = tuple[RotarySpec | None, Temperature | None]
    """The RoPE of a layer, and the temperature of its queries."""
    Splice = tuple[Tensor, Tensor]
    """Indices (E,) of tokens, and rows (E, hidden)."""

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


class Entering(NamedTuple):
    """What enters the layers of a pass."""

    stream: Tensor  # (T, hidden)
    added: tuple[Splice, ...] = ()  # what is added behind each of the first layers
    by_layer: Tensor | None = None  # (T, L, P) the layers' own inputs


class Decoder(Module):
    """Layers between an embedding and the final norm with a head.

    Of several pipeline stages each has some of the layers; the first one has the embedding, and the
    last one the norm and the head.
    """

    def __init__(
        self, spec: ModelSpec, build: BuildContext, method: LinearMethod = LinearMethod.PLAIN
    ) -> None:
        self.invariant = method.invariant
        """Whether its linears are batch-invariant."""
        if isinstance(spec.head, HeadSpec) and spec.head.softcap is not None:
            self.kernels = frozenset({"logits.softcap"})
        self._dtype = build.dtype
        self._spec = spec
        self._pp = build.pp
        self._next = None if build.is_last_stage else build.pp
        self._numbers = build.stage_layers(len(spec.layers))
        sites = (
            LayerBuildContext(index, spec.layer_name.format(index), spec.hidden, build, method)
            for index in self._numbers
        )
        specs = spec.layers[self._numbers.start : self._numbers.stop]
        self.layers = [DecoderLayer(*each) for each in zip(sites, specs, strict=True)]
        self.embedding = self._entry = self._norm = self._head = self._score = None
        self._by_layer = self._streams = None
        # Fused layers end in a norm; what it makes in a stage before the last one, nothing reads.
        self._unread = None if self._next is None else build_norm(spec.norm, "", spec.hidden, build)
        first, last = build.is_first_stage, build.is_last_stage
        if first:
            # A table that is only looked up is fastest in its stored layout, one row a token.
            table_method = method if spec.tied and last else LinearMethod.PLAIN
            self.embedding = _table(spec, spec.embedding.name, build, table_method)
            self._entry = EmbeddingTransform(spec, build)
        if spec.per_layer_embedding is not None:
            assert build.pp is None, "such a model has one stage"
            self._by_layer = PerLayerEmbedding(
                spec.per_layer_embedding, spec.hidden, len(spec.layers), build, method
            )
        if spec.streams is not None:
            assert build.pp is None, "such a model has one stage"
            self._streams = Streams(spec.streams, spec.hidden, build, method)
        if last:
            self._build_head(build, method)
        head = None if self._head is self.embedding else self._head
        begin = (self.embedding, self._entry, self._by_layer, self._streams)
        self.children = (*begin, *self.layers, self._norm, head, self._score)

    def _build_head(self, build: BuildContext, method: LinearMethod) -> None:
        spec = self._spec
        if spec.norm_name is not None:
            self._norm = build_norm(spec.norm, spec.norm_name, spec.hidden, build)
        match spec.head:
            case HeadSpec(tied=True):
                self._head = self.embedding or _table(spec, spec.embedding.name, build, method)
            case HeadSpec(name=name, bias=bias):
                self._head = _table(spec, name, build, method, bias=bias)
            case ClassificationHeadSpec():
                self._score = ClassificationHead(spec.head, spec.hidden, build, method)
            case None:
                pass

    @property
    def elsewhere(self) -> tuple[str, ...]:
        """Prefixes of tensors that other stages load."""
        if self._pp is None:
            return ()
        spec, embedding = self._spec, self._spec.embedding
        names = [spec.layer_name.format(i) for i in range(len(spec.layers))]
        names = [name for i, name in enumerate(names) if i not in self._numbers]
        if self.embedding is None:
            names += filter(None, (embedding.positions, embedding.types, embedding.norm_name))
            names.append(embedding.name)
        if self._head is None:
            names += [spec.norm_name or ""]
            names += [spec.head.name] if isinstance(spec.head, HeadSpec) else []
        return tuple(f"{name}." for name in names if name)

    def forward(
        self, ctx: ForwardContext, tokens: Tensor, splices: tuple[Tensor, Tensor] | None = None
    ) -> HiddenStates:
        """Run the layers on tokens (T,); stages pass the residual stream on to each other.

        `splices` are indices (E,) of tokens, and rows (E, hidden) that stand in place of theirs in
        the stream that enters the first layer. Wider rows, (E, (1 + N) * hidden), have in their
        other parts what is added to these tokens behind each of the first N layers (deepstack). The
        hidden states of a stage before the last one are the stream.

        Source: Meng et al. 2024, arXiv:2406.04334.
        """
        return self.run_layers(ctx, *self.enter(ctx, tokens, splices))

    def enter(
        self, ctx: ForwardContext, tokens: Tensor, splices: tuple[Tensor, Tensor] | None = None
    ) -> Entering:
        """What enters the first layer, and the next ones beside the stream: see `forward`."""
        residual, media = self._receive(ctx, tokens), None
        added: tuple[Splice, ...] = ()
        if splices is not None:
            media, rows = splices
            parts = rows.to(residual.dtype).view(len(rows), -1, self._spec.hidden).unbind(1)
            if self.embedding is not None:
                residual = residual.index_copy(0, media, parts[0])
            added = tuple((media, part) for part in parts[1:])
        if self._by_layer is None:
            return Entering(residual, added)
        return Entering(residual, added, self._by_layer(ctx, tokens, residual, media))

    def run_layers(
        self,
        ctx: ForwardContext,
        residual: Tensor,
        added: Sequence[Splice] = (),
        by_layer: Tensor | None = None,
    ) -> HiddenStates:
        """Run the layers on the stream (T, hidden), which is overwritten: see `enter`."""
        if ctx.fused is not None and not added:
            states = HiddenStates(*ctx.fused(residual))
            if self._next is None:
                return states
            hidden, aux = residual, None  # the sum behind the last layer
        else:
            pending, entering = None, list["Tensor"]()
            if self._streams is not None:
                residual = self._streams.split(ctx, residual)
            for index, layer in zip(self._numbers, self.layers, strict=True):
                if index in ctx.aux_layers:
                    entering.append(residual.clone() if pending is None else residual + pending)
                own = None if by_layer is None else by_layer[:, index]
                pending, residual = layer(ctx, pending, residual, own)
                if index < len(added):
                    residual = residual.index_add(0, *added[index])
            if self._streams is not None:
                residual = self._streams.merge(ctx, residual)
            hidden, _ = _enter(ctx, self._norm, pending, residual)
            aux = torch.cat(entering, dim=-1) if entering else None
        if self._next is not None:
            self._next.send(hidden)
        return HiddenStates(hidden, ctx.ops.finite_rows(hidden), aux)

    def _receive(self, ctx: ForwardContext, tokens: Tensor) -> Tensor:
        """What the embedding makes of tokens, or the stage before, (T, hidden)."""
        if self.embedding is not None and self._entry is not None:
            return self._entry(ctx, self.embedding.embed(ctx, tokens))
        assert self._pp is not None, "a later stage"
        size = len(tokens), self._spec.hidden
        stream = torch.empty(size, dtype=self._dtype, device=tokens.device)
        self._pp.receive(stream)
        return stream

    def stack(
        self,
        caches: Mapping[int, LayerKvCache | UncachedHeads],
        states: Mapping[int, LayerStates],
        aux_layers: tuple[int, ...] = (),
    ) -> tuple[FusedDecoder, tuple[PositionSpec, ...]]:
        """Fuse the layers and the final norm, or the whole model, into one call of the kernels.

        Also returns what its layers have of positions, each kind once.
        """
        spec = self._spec
        rotaries: dict[PositionSpec, int] = {}
        layers = [
            (layer.stacked(rotaries, states.get(index)), caches.get(index))
            for index, layer in zip(self._numbers, self.layers, strict=True)
        ]
        if not rotaries:
            raise NotStackable("no layer has attention")
        if len({spec.norm, *(layer.norm for layer in spec.layers)}) > 1:
            raise NotStackable("the norms differ between layers")
        final_norm = self._norm or self._unread
        if final_norm is not None and final_norm.weights is None:
            raise NotStackable("a norm without weights has no kernel")
        if self._next is not None and spec.layers[self._numbers[-1]].norms.with_feed_forward:
            raise NotStackable("a stage ends in a norm of the stream")
        fused = FusedDecoder(
            layers,
            hidden=spec.hidden,
            dtype=self._dtype,
            final_norm=None if final_norm is None else final_norm.weights,
            eps=spec.norm.eps,
            norm=spec.norm.kernel,
            ends=self._ends(),
            aux_layers=aux_layers,
        )
        return fused, tuple(rotaries)

    def _ends(self) -> EmbeddingAndHead | None:
        """Embedding and head for the fused decoder, if it has all that they need."""
        head, spec, entry = self._head, self._spec.head, self._entry
        if self.embedding is None or entry is None:
            return None
        packed, table = self.embedding.packed, self.embedding.table
        embedding = table if packed is None else packed
        if not isinstance(spec, HeadSpec) or not entry.stackable or embedding is None:
            return None
        if head is None or head.packed is None:
            return None
        return EmbeddingAndHead(
            embedding=embedding,
            head=head.packed,
            embedding_scale=entry.scale,
            positions=entry.learned_positions,
            logits_scale=spec.scale,
            softcap=spec.softcap,
        )

    def logits(self, ctx: ForwardContext, hidden: Tensor) -> Tensor:
        """Logits of normalised hidden states (L, hidden)  ->  (L, V) float32."""
        head = self._spec.head
        assert isinstance(head, HeadSpec), "a model that generates text"
        assert self._head is not None, "whose head was built"
        logits = self._head.logits(ctx, hidden)
        if head.scale != 1.0:
            logits = logits * head.scale
        return logits if head.softcap is None else ctx.ops.soft_capped(logits, head.softcap)

    def scores(self, ctx: ForwardContext, pooled: Tensor) -> Tensor:
        """Class scores: pooled (R, hidden) of the normalised stream  ->  (R, labels) float32.

        Raw logits, before any softmax.
        """
        assert self._score is not None, "a model with a classification head"
        return self._score(ctx, pooled)


def _table(
    spec: ModelSpec, name: str, build: BuildContext, method: LinearMethod, *, bias: bool = False
) -> VocabParallelEmbedding:
    return VocabParallelEmbedding(name, spec.vocabulary, spec.hidden, build, method, bias=bias)


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
        entered, residual = _enter(ctx, norm("before_mixer"), pending, residual)
        mixed = self._leave(ctx, norm("after_mixer"), ctx.mix(self._mixer, entered))
        mixed, residual = _join(ctx, norm("with_mixer"), mixed, residual)
        if self._laurel is not None:
            assert mixed is not None, "what was mixed is added here"
            mixed, residual = None, self._laurel(ctx, entered, residual + mixed)
        if self._cross is not None:
            entered, residual = _enter(ctx, norm("before_cross"), mixed, residual)
            mixed = ctx.mix(self._cross, entered)
        if self._feed_forward is None:
            return mixed, residual
        if self._parallel:
            if (own_norm := norm("before_feed_forward")) is not None:
                entered = own_norm(ctx, residual)
            beside = self._feed_forward(ctx, entered)
            assert mixed is not None, "parallel blocks are added to the stream together"
            return mixed + self._leave(ctx, norm("after_feed_forward"), beside), residual
        entered, residual = _enter(ctx, norm("before_feed_forward"), mixed, residual)
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


class EmbeddingTransform(Module):
    """Scale, token-type embeddings, position embeddings and norm, as far as a model has them."""

    def __init__(self, spec: ModelSpec, build: BuildContext) -> None:
        embedding = spec.embedding
        # The scale is rounded to the dtype of the embeddings, as in transformers.
        self.scale = float(torch.tensor(embedding.scale, dtype=build.dtype))
        self._types = self._positions = self._norm = None
        if embedding.types is not None:
            self._types = AddedEmbedding(embedding.types, embedding.types_count, spec.hidden, build)
        if embedding.positions is not None:
            rows, first = spec.context_tokens, embedding.positions_first
            self._positions = AddedEmbedding(
                embedding.positions, rows, spec.hidden, build, first=first
            )
        if embedding.norm is not None:
            self._norm = build_norm(embedding.norm, embedding.norm_name, spec.hidden, build)
        self.children = (self._types, self._positions, self._norm)

    @property
    def learned_positions(self) -> Tensor | None:
        """The embedding of each position, (positions, hidden)."""
        return None if self._positions is None else self._positions.table

    @property
    def stackable(self) -> bool:
        """Whether the fused decoder can make the stream from ids."""
        return self._types is None and self._norm is None

    def __call__(self, ctx: ForwardContext, embedded: Tensor) -> Tensor:
        """Make the residual stream from embeddings (T, hidden)  ->  (T, hidden)."""
        if self.scale != 1.0:
            embedded = embedded * self.scale
        if self._types is not None:
            embedded = self._types.add(embedded, ctx.token_types)
        if self._positions is not None:
            assert ctx.positions is not None, "a model with learned positions"
            embedded = self._positions.add(embedded, ctx.positions)
        return embedded if self._norm is None else self._norm(ctx, embedded)
