"""The one decoder. What differs between families is in the spec that it is built from.

Axes: T tokens, L tokens whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from antiphon.kernels.cpu.stack import Stack, StackLayer
from antiphon.layers.attention import Attention, AttentionShape
from antiphon.layers.embedding import VocabularyTable
from antiphon.layers.methods import PlainLinear
from antiphon.layers.mlp import GatedMlp, MlpShape
from antiphon.layers.norm import RmsNorm

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from antiphon.kernels.kv import LayerCache
    from antiphon.layers.context import ForwardContext
    from antiphon.layers.methods import LinearMethod
    from antiphon.layers.weights import Build, WeightSource
    from antiphon.model_worker.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Hidden:
    """What a run of layers leaves.

    Attributes:
        last: (T, hidden), ready for the head if this is the last stage, else the residual stream.
        aux: The residual stream that left each layer that was asked for.
        checked: Whether somebody looked for numbers that are not finite.
        finite: (T,) bool, whether all of a token's numbers are; None: all are, if checked.
    """

    last: Tensor
    aux: dict[int, Tensor]
    checked: bool = False
    finite: Tensor | None = None


class NotPlain(Exception):
    """These layers cannot be run as one stack; the message says why."""


class DecoderLayer:
    """Attention, then the feed-forward block, each on a normalised residual stream."""

    def __init__(self, spec: ModelSpec, index: int, build: Build, method: LinearMethod) -> None:
        names, name = spec.names, spec.names.layer.format(index)
        self._attention_norm = RmsNorm(
            f"{name}.{names.attention_norm}", spec.hidden, spec.norm_eps, build
        )
        self._attention = Attention(
            f"{name}.attention", index, _attention_shape(spec, name), build, method
        )
        self._mlp_norm = RmsNorm(f"{name}.{names.mlp_norm}", spec.hidden, spec.norm_eps, build)
        self._mlp = GatedMlp(f"{name}.mlp", _mlp_shape(spec, name), build, method)

    def __call__(
        self, ctx: ForwardContext, pending: Tensor | None, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run the layer. The block output that is not yet in the residual stream is `pending`.

        It is added by the norm that reads it, which saves a pass over memory a block.
        """
        if pending is None:
            normed = self._attention_norm(ctx, residual)
        else:
            normed, residual = self._attention_norm.add(ctx, pending, residual)
        attended = self._attention(ctx, normed)
        normed, residual = self._mlp_norm.add(ctx, attended, residual)
        return self._mlp(ctx, normed), residual

    @property
    def packed(self) -> StackLayer | None:
        """What a stack computes this layer with, if its linears are packed for that."""
        attention, mlp = self._attention.packed, self._mlp.packed
        if attention is None or mlp is None:
            return None
        return StackLayer(
            qkv=attention[0],
            out=attention[1],
            gate_up=mlp[0],
            down=mlp[1],
            attention_norm=self._attention_norm.weight,
            mlp_norm=self._mlp_norm.weight,
            head_norms=None,
        )

    def sources(self) -> Iterator[WeightSource]:
        """Tensors of all four parts."""
        for part in (self._attention_norm, self._attention, self._mlp_norm, self._mlp):
            yield from part.sources()

    def pack(self) -> None:
        """Called once all sources are loaded."""
        self._attention.pack()
        self._mlp.pack()


class Decoder:
    """A run of a model's layers; the first run embeds, the last normalises and has the head."""

    def __init__(
        self,
        spec: ModelSpec,
        build: Build,
        *,
        layers: range | None = None,
        method: LinearMethod | None = None,
    ) -> None:
        method = method or PlainLinear()
        self.invariant = method.invariant
        """Whether its linears give a row the same bits whatever else is in the pass."""
        run = layers if layers is not None else range(spec.layers)
        self._first, self._last = run.start == 0, run.stop == spec.layers
        self.layers = {index: DecoderLayer(spec, index, build, method) for index in run}
        self._embedding = self._norm = self._head = None
        if self._first or (self._last and spec.tied):
            # A table that is only looked up lies best as it comes, a row a token.
            kept = method if spec.tied else PlainLinear()
            self._embedding = _table(spec, spec.names.embedding, build, kept)
        if self._last:
            self._norm = RmsNorm(spec.names.final_norm, spec.hidden, spec.norm_eps, build)
            head = spec.names.head
            self._head = self._embedding if spec.tied else _table(spec, head, build, method)

    def embed(self, ctx: ForwardContext, tokens: Tensor) -> Tensor:
        """The residual stream that enters the first layer, (T, hidden)."""
        assert self._first, "only the first stage embeds"
        assert self._embedding is not None
        return self._embedding.embed(ctx, tokens)

    def forward(
        self,
        ctx: ForwardContext,
        *,
        tokens: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        aux_layers: frozenset[int] = frozenset(),
    ) -> Hidden:
        """Run the layers on `tokens` (T,), or on `inputs_embeds` (T, hidden).

        A later stage takes the earlier one's `last` as its `inputs_embeds`.
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
                aux[index] = residual + pending
        if self._norm is None:
            return Hidden(residual if pending is None else residual + pending, aux)
        if pending is None:
            return Hidden(self._norm(ctx, residual), aux)
        normed, _ = self._norm.add(ctx, pending, residual)
        return Hidden(normed, aux)

    def stack(self, caches: Mapping[int, LayerCache], *, eps: float, scale: float) -> Stack:
        """All layers and the final norm as one call of the CPU's own kernels.

        Raises:
            NotPlain: The layers are not of the shape that it knows.
        """
        if self._norm is None or not self._first:
            raise NotPlain("this is a stage of a pipeline")
        layers: list[tuple[StackLayer, LayerCache]] = []
        for index, layer in self.layers.items():
            if (packed := layer.packed) is None:
                raise NotPlain("the linears are not packed whole on one rank")
            layers.append((packed, caches[index]))
        return Stack(layers, final_norm=self._norm.weight, eps=eps, scale=scale)

    def logits(self, ctx: ForwardContext, hidden: Tensor) -> Tensor:
        """Score normalised hidden (L, hidden)  ->  (L, V) float32."""
        assert self._head is not None, "only the last stage has the head"
        return self._head.logits(ctx, hidden)

    def sources(self) -> Iterator[WeightSource]:
        """Every tensor that these layers take from the checkpoint."""
        if self._embedding is not None:
            yield from self._embedding.sources()
        for layer in self.layers.values():
            yield from layer.sources()
        if self._norm is not None:
            yield from self._norm.sources()
        if self._head is not None and self._head is not self._embedding:
            yield from self._head.sources()

    def pack(self) -> None:
        """Called once all sources are loaded."""
        for part in (*self.layers.values(), *self._tables()):
            part.pack()

    def _tables(self) -> set[VocabularyTable]:
        """The embedding and the head, which may be one."""
        return {table for table in (self._embedding, self._head) if table is not None}


def _table(spec: ModelSpec, name: str, build: Build, method: LinearMethod) -> VocabularyTable:
    return VocabularyTable(name, spec.vocabulary, spec.hidden, build, method)


def _attention_shape(spec: ModelSpec, name: str) -> AttentionShape:
    return AttentionShape(
        hidden=spec.hidden,
        query_heads=spec.query_heads,
        kv_heads=spec.kv_heads,
        head_size=spec.head_size,
        qkv_bias=spec.biases.qkv,
        out_bias=spec.biases.out,
        query=f"{name}.{spec.names.query}",
        key=f"{name}.{spec.names.key}",
        value=f"{name}.{spec.names.value}",
        out=f"{name}.{spec.names.out}",
    )


def _mlp_shape(spec: ModelSpec, name: str) -> MlpShape:
    return MlpShape(
        hidden=spec.hidden,
        width=spec.mlp_width,
        bias=spec.biases.mlp,
        gate=f"{name}.{spec.names.gate}",
        up=f"{name}.{spec.names.up}",
        down=f"{name}.{spec.names.down}",
    )
