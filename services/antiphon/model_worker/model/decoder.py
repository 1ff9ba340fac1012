"""The decoder of all families; what differs between them is in the `ModelSpec`.

Axes: T tokens, L tokens whose logits are requested, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from antiphon.kernels.cpu.fused_decoder import EmbeddingAndHead, FusedDecoder
from antiphon.layers.attention import AttentionSpec
from antiphon.layers.classification_head import ClassificationHead, ClassificationHeadSpec
from antiphon.layers.embedding import LearnedPositions, TokenTypes, VocabParallelEmbedding
from antiphon.layers.methods import PlainLinearMethod
from antiphon.layers.norm import RmsNorm, build_norm
from antiphon.layers.sublayer import LayerBuildContext
from antiphon.model_worker.model.layer import DecoderLayer, NotStackable
from antiphon.model_worker.model.spec import HeadSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from antiphon.kernels.kv import LayerKvCache
    from antiphon.kernels.rotary import RotarySpec
    from antiphon.layers.context import ForwardContext
    from antiphon.layers.methods import LinearMethod
    from antiphon.layers.weights import BuildContext, WeightSource
    from antiphon.model_worker.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Hidden:
    """The output of a range of layers.

    Attributes:
        last: (T, hidden), ready for the head if this is the last stage, else the residual stream.
        aux: The residual stream after each layer in `aux_layers`.
        checked: Whether the output was checked for NaN and infinity.
        finite: (T,) bool, whether all of a token's elements are finite; None: all are, if checked.
    """

    last: Tensor
    aux: dict[int, Tensor]
    checked: bool = False
    finite: Tensor | None = None


class Decoder:
    """A range of layers; the first has the embedding, the last the final norm and the head."""

    def __init__(
        self,
        spec: ModelSpec,
        build: BuildContext,
        *,
        layers: range | None = None,
        method: LinearMethod | None = None,
    ) -> None:
        method = method or PlainLinearMethod()
        self.invariant = method.invariant
        """Whether its linears are batch-invariant."""
        self._spec = spec
        run = layers if layers is not None else range(len(spec.layers))
        self._first, self._last = run.start == 0, run.stop == len(spec.layers)
        self.layers = {
            index: DecoderLayer(_site(spec, index, build, method), spec.layers[index])
            for index in run
        }
        self._embedding = self._entry = self._norm = self._head = self._score = None
        if self._first or (self._last and spec.tied):
            # A table that is only looked up is fastest in its stored layout, one row a token.
            table_method = method if spec.tied else PlainLinearMethod()
            self._embedding = _table(spec, spec.embedding.name, build, table_method)
        if self._first:
            self._entry = EmbeddingTransform(spec, build)
        if self._last:
            if spec.norm_name is not None:
                self._norm = build_norm(spec.norm, spec.norm_name, spec.hidden, build)
            match spec.head:
                case HeadSpec(tied=True):
                    self._head = self._embedding
                case HeadSpec(name=name, bias=bias):
                    self._head = _table(spec, name, build, method, bias=bias)
                case ClassificationHeadSpec():
                    self._score = ClassificationHead(spec.head, spec.hidden, build, method)
                case None:
                    pass

    @property
    def operations(self) -> frozenset[str]:
        ends = (self._entry, self._norm, self._score)
        parts = (*self.layers.values(), *(part for part in ends if part is not None))
        return frozenset[str]().union(*(part.operations for part in parts))

    def embed(self, ctx: ForwardContext, tokens: Tensor) -> Tensor:
        """The residual stream that enters the first layer, (T, hidden)."""
        assert self._first, "only the first stage embeds"
        assert self._embedding is not None
        assert self._entry is not None
        return self._entry(ctx, self._embedding.embed(ctx, tokens))

    def forward(
        self,
        ctx: ForwardContext,
        *,
        tokens: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        aux_layers: frozenset[int] = frozenset(),
    ) -> Hidden:
        """Run the layers on `tokens` (T,), or on `inputs_embeds` (T, hidden).

        A later stage takes the `last` of the earlier stage as its `inputs_embeds`.
        """
        owned = inputs_embeds is None
        if inputs_embeds is None:
            assert tokens is not None, "either tokens or their embeddings"
            inputs_embeds = self.embed(ctx, tokens)
        if ctx.fused is not None and not aux_layers:
            last, finite = ctx.fused(inputs_embeds if owned else inputs_embeds.clone())
            return Hidden(last, {}, checked=True, finite=finite)
        pending, residual = None, inputs_embeds
        aux: dict[int, Tensor] = {}
        for index, layer in self.layers.items():
            pending, residual = layer(ctx, pending, residual)
            if index in aux_layers:
                aux[index] = residual if pending is None else residual + pending
        if self._norm is None:
            return Hidden(residual if pending is None else residual + pending, aux)
        if pending is None:
            return Hidden(self._norm(ctx, residual), aux)
        normed, _ = self._norm.add(ctx, pending, residual)
        return Hidden(normed, aux)

    def stack(self, caches: Mapping[int, LayerKvCache]) -> FusedDecoder:
        """Fuse the layers and the final norm, or the whole model, into one call of the kernels."""
        if not (self._first and self._last):
            raise NotStackable("this is a pipeline stage")
        if not isinstance(self._norm, RmsNorm):
            raise NotStackable("the final norm differs from Llama's")
        layers = [(layer.stacked(), caches[index]) for index, layer in self.layers.items()]
        norms = {self._spec.norm, *(layer.norm for layer in self._spec.layers)}
        scale, _ = self._shared()
        if len(norms) > 1:
            raise NotStackable("the norms differ between layers")
        return FusedDecoder(
            layers,
            final_norm=self._norm.weight,
            eps=self._norm.eps,
            scale=scale,
            ends=self._ends(),
        )

    def _ends(self) -> EmbeddingAndHead | None:
        """Embedding and head for the fused decoder, if nothing else transforms ids or logits."""
        head, spec = self._head, self._spec.head
        plain = isinstance(spec, HeadSpec) and spec.scale == 1.0 and spec.softcap is None
        if not plain or head is None or self._embedding is None or self._entry is None:
            return None
        packed, table = self._embedding.packed, self._embedding.table
        embedding = table if packed is None else packed
        if head.packed is None or embedding is None or not self._entry.plain:
            return None
        return EmbeddingAndHead(embedding=embedding, head=head.packed)

    @property
    def rotary(self) -> RotarySpec | None:
        """The RoPE that all layers share, for the fused decoder; None without RoPE."""
        return self._shared()[1]

    def _shared(self) -> tuple[float, RotarySpec | None]:
        mixers: list[object] = [layer.mixer for layer in self._spec.layers]
        ways = {(mixer.scale, mixer.rotary) for mixer in mixers if isinstance(mixer, AttentionSpec)}
        if len(ways) != 1:
            raise NotStackable("attention scale or RoPE differ between layers")
        return ways.pop()

    def logits(self, ctx: ForwardContext, hidden: Tensor) -> Tensor:
        """Logits of normalised hidden states (L, hidden)  ->  (L, V) float32."""
        head = self._spec.head
        assert isinstance(head, HeadSpec), "a model that writes"
        assert self._head is not None, "only the last stage has the head"
        logits = self._head.logits(ctx, hidden)
        if head.scale != 1.0:
            logits = logits * head.scale
        return logits if head.softcap is None else head.softcap * (logits / head.softcap).tanh()

    def scores(self, ctx: ForwardContext, pooled: Tensor) -> Tensor:
        """Class scores: pooled (R, hidden) of the normalised stream  ->  (R, labels) float32.

        Raw logits, before any softmax.
        """
        assert self._score is not None, "the last stage of a model that judges"
        return self._score(ctx, pooled)

    def sources(self) -> Iterator[WeightSource]:
        head = None if self._head is self._embedding else self._head
        ends = (self._norm, head, self._score)
        for part in (self._embedding, self._entry, *self.layers.values(), *ends):
            if part is not None:
                yield from part.sources()

    def pack(self) -> None:
        """Prepare weights for computing; called once all sources are loaded."""
        for part in (*self.layers.values(), *self._tables()):
            part.pack()
        if self._score is not None:
            self._score.pack()

    def _tables(self) -> set[VocabParallelEmbedding]:
        return {table for table in (self._embedding, self._head) if table is not None}


def _site(
    spec: ModelSpec, index: int, build: BuildContext, method: LinearMethod
) -> LayerBuildContext:
    name = spec.layer_name.format(index)
    return LayerBuildContext(layer=index, name=name, hidden=spec.hidden, build=build, method=method)


def _table(
    spec: ModelSpec, name: str, build: BuildContext, method: LinearMethod, *, bias: bool = False
) -> VocabParallelEmbedding:
    return VocabParallelEmbedding(name, spec.vocabulary, spec.hidden, build, method, bias=bias)


class EmbeddingTransform:
    """Scale, token-type embeddings, position embeddings and norm, as far as a model has them."""

    def __init__(self, spec: ModelSpec, build: BuildContext) -> None:
        embedding = spec.embedding
        # The scale is rounded to the dtype of the embeddings, as in transformers.
        self._scale = float(torch.tensor(embedding.scale, dtype=build.dtype))
        self._types = self._positions = self._norm = None
        if embedding.types is not None:
            self._types = TokenTypes(embedding.types, embedding.types_count, spec.hidden, build)
        if embedding.positions is not None:
            self._positions = LearnedPositions(
                embedding.positions,
                spec.context_tokens,
                embedding.positions_first,
                spec.hidden,
                build,
            )
        if embedding.norm is not None:
            self._norm = build_norm(embedding.norm, embedding.norm_name, spec.hidden, build)

    @property
    def plain(self) -> bool:
        parts = (self._types, self._positions, self._norm)
        return self._scale == 1.0 and all(part is None for part in parts)

    @property
    def operations(self) -> frozenset[str]:
        return frozenset[str]() if self._norm is None else self._norm.operations

    def __call__(self, ctx: ForwardContext, embedded: Tensor) -> Tensor:
        """Make the residual stream from embeddings (T, hidden)  ->  (T, hidden)."""
        if self._scale != 1.0:
            embedded = embedded * self._scale
        if self._types is not None:
            embedded = self._types.add(ctx, embedded)
        if self._positions is not None:
            embedded = self._positions.add(ctx, embedded)
        return embedded if self._norm is None else self._norm(ctx, embedded)

    def sources(self) -> Iterator[WeightSource]:
        for part in (self._types, self._positions, self._norm):
            if part is not None:
                yield from part.sources()
