"""Per-layer embeddings: what each layer reads of a token beside the residual stream.

A table has for each token a vector for each layer. These are added to projections of the stream as
it enters the first layer, and each layer adds its own to the stream behind its blocks, through a
gate.

Source: Gemma 3n and Gemma 4, as transformers computes them.

Axes: T tokens, L layers, P size of the input of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from antiphon.layers.embedding import VocabParallelEmbedding
from antiphon.layers.linear import replicated
from antiphon.layers.methods import LinearMethod
from antiphon.layers.norm import NormSpec, build_norm
from antiphon.layers.weights import BuildContext, Module

if TYPE_CHECKING:
    from torch import Tensor

    from antiphon.kernels.activation import ActivationKind
    from antiphon.layers.context import ForwardContext
    from antiphon.layers.sublayer import LayerBuildContext

HALF = 2.0**-0.5
"""The sum of two vectors of unit variance has unit variance, too, if it is multiplied by this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PerLayerEmbeddingSpec:
    """The inputs of all layers."""

    size: int  # of the input of a layer
    vocabulary: int  # rows of the table
    # Whose row stands for tokens that are replaced by embeddings of media, and for those beyond
    # the table.
    media_token: int
    norm: NormSpec  # of each projection
    table: str = "model.embed_tokens_per_layer"
    projection: str = "model.per_layer_model_projection"
    norm_name: str = "model.per_layer_projection_norm"


class PerLayerEmbedding(Module):
    """Makes the inputs of all layers. The table is scaled by the root of P."""

    def __init__(
        self,
        spec: PerLayerEmbeddingSpec,
        hidden: int,
        layers: int,
        build: BuildContext,
        method: LinearMethod,
    ) -> None:
        self._size, self._media_token = spec.size, spec.media_token
        self._rows = spec.vocabulary
        # Rounded to the dtype of the embeddings, as in transformers.
        self._scale = float(torch.tensor(spec.size**0.5, dtype=build.dtype))
        self._projection_scale = hidden**-0.5
        width = layers * spec.size
        self._table = VocabParallelEmbedding(
            spec.table, spec.vocabulary, width, build, LinearMethod.PLAIN
        )
        self._projection = replicated(
            spec.projection, hidden, width, bias=False, build=build, method=method
        )
        self._norm = build_norm(spec.norm, spec.norm_name, spec.size, build)
        self.children = (self._table, self._projection, self._norm)

    def __call__(
        self, ctx: ForwardContext, tokens: Tensor, entering: Tensor, media: Tensor | None
    ) -> Tensor:
        """The inputs of all layers, (T, L, P).

        tokens (T,); entering (T, hidden), the stream as it enters the first layer; media (E,),
        indices of the tokens that embeddings of media have replaced there, None for none
        """
        if media is not None:
            tokens = tokens.index_fill(0, media, self._media_token)
        tokens = tokens.masked_fill(tokens >= self._rows, self._media_token)
        said = self._table.embed(ctx, tokens) * self._scale
        projected = self._projection(ctx, entering) * self._projection_scale
        projected = self._norm(ctx, projected.view(-1, self._size))
        return (projected + said.view(-1, self._size)).mul_(HALF).view(len(tokens), -1, self._size)


@dataclass(frozen=True, slots=True, kw_only=True)
class PerLayerInputSpec:
    """What a layer does with its input; names of tensors are relative to the layer."""

    size: int
    activation: ActivationKind
    norm: NormSpec  # of what is added to the stream
    gate: str = "per_layer_input_gate"
    projection: str = "per_layer_projection"
    norm_name: str = "post_per_layer_input_norm"


class PerLayerInput(Module):
    """norm(projection(activation(gate(x)) * input))."""

    kernels = frozenset({"activation.plain"})

    def __init__(self, site: LayerBuildContext, spec: PerLayerInputSpec) -> None:
        self._activation: ActivationKind = spec.activation
        self._gate = site.replicated(spec.gate, spec.size, bias=False)
        self._projection = replicated(
            site.tensor_name(spec.projection),
            spec.size,
            site.hidden,
            bias=False,
            build=site.build,
            method=site.method,
        )
        self._norm = site.norm(spec.norm, spec.norm_name, site.hidden)
        self.children = (self._gate, self._projection, self._norm)

    def __call__(self, ctx: ForwardContext, x: Tensor, own: Tensor) -> Tensor:
        """What is added to the stream x (T, hidden), by the layer's input (T, P)."""
        opened = ctx.ops.activate(self._gate(ctx, x), self._activation)
        return self._norm(ctx, self._projection(ctx, opened * own))
