"""The decoder of all families; what differs between them is in the `ModelSpec`.

Axes: T tokens, L tokens whose logits are requested, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from antiphon.kernels.cpu.fused_decoder import EmbeddingAndHead, FusedDecoder, UncachedHeads
from antiphon.layers.alternating_updates import Streams
from antiphon.layers.classification_head import ClassificationHead, ClassificationHeadSpec
from antiphon.layers.context import HiddenStates
from antiphon.layers.embedding import AddedEmbedding, VocabParallelEmbedding
from antiphon.layers.methods import LinearMethod
from antiphon.layers.norm import build_norm
from antiphon.layers.per_layer_embedding import PerLayerEmbedding
from antiphon.layers.sublayer import LayerBuildContext
from antiphon.layers.weights import BuildContext, Module
from antiphon.model_worker.model.decoder_layer import DecoderLayer, NotStackable, enter_block
from antiphon.model_worker.model.spec import HeadSpec, ModelSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from antiphon.kernels.kv import LayerKvCache
    from antiphon.kernels.recurrent import LayerStates
    from antiphon.layers.context import ForwardContext
    from antiphon.model_worker.model.decoder_layer import PositionSpec

    Splice = tuple[Tensor, Tensor]
    """Indices (E,) of tokens, and rows (E, hidden)."""


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
            hidden, _ = enter_block(ctx, self._norm, pending, residual)
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
