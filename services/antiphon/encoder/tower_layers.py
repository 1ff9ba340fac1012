"""The layers of all towers: attention in both directions, and feed-forward blocks.

Where the CPU kernels run, all layers are one call, as those of a worker's encoders are, in which
what a row becomes does not depend on the rows beside it; elsewhere they are operations one by one.

Axes: T tokens of all rows, C width, N heads, D of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # the usual name
from torch import Tensor

from antiphon.kernels.attention import AttentionMetadata, KvShape, TextRows
from antiphon.kernels.cpu.fused_decoder import (
    BlockNorms,
    FusedDecoder,
    FusedDecoderLayer,
    UncachedHeads,
)
from antiphon.kernels.cpu.ops import PASS_PAGE_TOKENS
from antiphon.kernels.norm import NormWeights
from antiphon.kernels.op import DeviceCapability
from antiphon.kernels.ops import select
from antiphon.kernels.rotary import QkNormWeights, TokenCosSin, apply_rotary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.encoder.linear import Affine, ClippedLinear, Linear
    from antiphon.kernels.activation import ActivationKind
    from antiphon.kernels.norm import NormKind

QK_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class TowerLayer:
    """The weights of one layer. Query, key and value are one linear, (3 N D, C).

    A norm without bias is by root-mean-square. `up` in halves has a gate. `q_norm` and `k_norm`
    are those of all heads at once (C,), or of each (D,), if there are any; `after1` and `after2`
    are of what both blocks have made.
    """

    norm1: Affine
    qkv: Linear | ClippedLinear
    out: Linear | ClippedLinear
    norm2: Affine
    up: Linear | ClippedLinear
    down: Linear | ClippedLinear
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    after1: Affine | None = None
    after2: Affine | None = None


class TowerStreams(NamedTuple):
    """The residual stream, float32."""

    tapped: tuple[Tensor, ...]  # behind each of the layers that are tapped, (T, C)
    last: Tensor  # behind the last layer, (T, C)


class TowerLayers:
    """Layers, one or more, of one width and one kind of norm.

    `divisions` is for each layer which division of the tokens into rows it attends within, if there
    are several; `taps` are layers whose stream is a result, too, rising. With a `head` size heads
    are normalised one by one: queries and keys with weights, values without; scores are not scaled,
    and norms round once.
    """

    def __init__(
        self,
        layers: Sequence[TowerLayer],
        *,
        heads: int,
        activation: ActivationKind,
        eps: float,
        divisions: Sequence[int] | None = None,
        taps: Sequence[int] = (),
        head: int | None = None,
    ) -> None:
        self._layers, self._taps = layers, taps
        self._divisions = [0] * len(layers) if divisions is None else divisions
        self._activation: ActivationKind = activation
        self._heads, self._eps = heads, eps
        self._dtype = layers[0].qkv.dtype
        self._norm: NormKind = "rms" if layers[0].norm1.bias is None else "layer"
        if head is not None:
            self._norm = "rms_wide"
        self._ops = select(DeviceCapability("cpu", dtype=self._dtype))
        self._width = layers[0].qkv.inputs
        size = head or self._width // heads
        self._shape = KvShape(
            PASS_PAGE_TOKENS, heads, 1, size, self._dtype, None, bidirectional=True
        )
        self._scale = size**-0.5 if head is None else 1.0
        self._unit = torch.ones(size)
        self._norms = [(self._kept(each.norm1), self._kept(each.norm2)) for each in layers]
        self._norms_after = [
            tuple(norm and self._kept(norm) for norm in (each.after1, each.after2))
            for each in layers
        ]
        self._head_norms = [self._kept_heads(each) for each in layers]
        # The stack has no norms of values.
        self._packed = head is None and all(each.qkv.packed is not None for each in layers)
        self._fused = self._fuse() if self._packed else []

    def __call__(
        self,
        x: Tensor,
        divisions: Sequence[Sequence[int]],
        turns: tuple[Tensor, Tensor] | None = None,
        seen: Tensor | None = None,
    ) -> TowerStreams:
        """Run the layers: x (T, C) float32  ->  streams.

        `divisions` are the lengths of rows that follow each other, whose tokens attend to each
        other; `turns` cosine and signed sine of each token, (T, 1, D), where heads are rotated, or
        (T, 1, 2, D / 2) where each half of one is by itself. With `seen` (T,) bool all tokens are
        one row, and attend to those alone.
        """
        if self._packed and seen is None:
            return self._at_once(x, divisions, turns)
        return self.by_layer(x, divisions, turns, seen)

    def by_layer(
        self,
        x: Tensor,
        divisions: Sequence[Sequence[int]],
        turns: tuple[Tensor, Tensor] | None = None,
        seen: Tensor | None = None,
    ) -> TowerStreams:
        """The same by single operations; in one call all has the same bits."""
        tapped: list[Tensor] = []
        stream = x.to(self._dtype)
        if turns is not None:
            turns = turns[0].to(self._dtype), turns[1].to(self._dtype)
        for number, layer in enumerate(self._layers):
            norm1, norm2 = self._norms[number]
            after1, after2 = self._norms_after[number]
            heads = self._rounded(layer.qkv, self._normed(stream, norm1))
            mixed = self._attend(heads, number, divisions[self._divisions[number]], turns, seen)
            stream = stream + self._behind(self._rounded(layer.out, mixed), after1)
            wide = self._rounded(layer.up, self._normed(stream, norm2))
            activated = self._ops.gate if layer.up.halves else self._ops.activate
            made = self._rounded(layer.down, activated(wide, self._activation))
            stream = stream + self._behind(made, after2)
            if number in self._taps:
                tapped.append(stream.float())
        return TowerStreams(tuple(tapped), stream.float())

    def _attend(
        self,
        x: Tensor,
        number: int,
        rows: Sequence[int],
        turns: tuple[Tensor, Tensor] | None,
        seen: Tensor | None,
    ) -> Tensor:
        """Queries, keys and values (T, 3 N D)  ->  what heads mix of values, (T, N D)."""
        q, k, v = x.view(len(x), 3, self._heads, -1).unbind(1)  # each (T, N, D)
        norms = self._head_norms[number]
        if norms is not None and norms.over == "head":
            q, k = self._each(q, norms.query.weight), self._each(k, norms.key.weight)
            v = self._each(v, self._unit)
        elif norms is not None:
            q = self._ops.rmsnorm(q.flatten(1), norms.query.weight, norms.eps).view(q.shape)
            k = self._ops.rmsnorm(k.flatten(1), norms.key.weight, norms.eps).view(k.shape)
        if turns is not None:
            q, k = _turned(q, turns), _turned(k, turns)
        if seen is not None:
            # The kernels have no fewer keys than queries.
            q, k, v = (each.transpose(0, 1)[None] for each in (q, k[seen], v[seen]))
            mixed = F.scaled_dot_product_attention(q, k, v, scale=self._scale)  # (1, N, T, D)
            return mixed[0].transpose(0, 1).flatten(1)
        texts = TextRows(rows)
        return self._ops.bidirectional_attention(q, k, v, texts, self._scale, None).flatten(1)

    def _each(self, heads: Tensor, weight: Tensor) -> Tensor:
        """Normalise each of heads (T, N, D)."""
        normed = self._ops.rmsnorm_wide(heads.flatten(0, 1), weight, self._eps)
        return normed.view(heads.shape)

    def _behind(self, x: Tensor, norm: NormWeights | None) -> Tensor:
        return x if norm is None else self._normed(x, norm)

    def _normed(self, x: Tensor, norm: NormWeights) -> Tensor:
        if self._norm == "rms_wide":
            return self._ops.rmsnorm_wide(x, norm.weight, self._eps)
        if norm.bias is None:
            return self._ops.rmsnorm(x, norm.weight, self._eps)
        return self._ops.layernorm(x, norm.weight, norm.bias, self._eps)

    def _rounded(self, linear: Linear | ClippedLinear, x: Tensor) -> Tensor:
        return linear(x).to(self._dtype)

    def _at_once(
        self,
        x: Tensor,
        divisions: Sequence[Sequence[int]],
        turns: tuple[Tensor, Tensor] | None,
    ) -> TowerStreams:
        # Not kept: so is its memory for a pass, which may be half a gigabyte for a large image.
        stack = FusedDecoder(
            self._fused,
            hidden=self._width,
            dtype=self._dtype,
            final_norm=self._norms[0][0],  # there must be one; what it makes is not read
            eps=self._eps,
            norm=self._norm,
            aux_layers=[tap + 1 for tap in self._taps if tap + 1 < len(self._layers)],
        )
        stream = x.to(self._dtype, copy=True, memory_format=torch.contiguous_format)
        still = stream.new_empty((len(x), 1, 0))
        cos, sin = (still, still) if turns is None else turns
        every = np.arange(len(x), dtype=np.int32)
        angles = TokenCosSin(cos.to(self._dtype), sin.to(self._dtype), every)
        groups = [
            AttentionMetadata.of_texts(self._shape, np.array(rows, np.int32)) for rows in divisions
        ]
        _, _, entering = stack(stream, [angles], groups)  # the stream is in its place afterwards
        last = stream.float()
        tapped: list[Tensor] = []
        if entering is not None:
            by_layer = entering.view(len(x), -1, self._width).unbind(1)
            tapped += (part.float().contiguous() for part in by_layer)
        if len(tapped) < len(self._taps):
            tapped.append(last)
        return TowerStreams(tuple(tapped), last)

    def _fuse(self) -> list[tuple[FusedDecoderLayer, UncachedHeads]]:
        return [
            (
                FusedDecoderLayer(
                    qkv=layer.qkv.packed,
                    out=layer.out.packed,
                    gate_up=layer.up.packed,
                    down=layer.down.packed,
                    activation=self._activation,
                    attention_norms=BlockNorms(norm1),
                    mlp_norms=BlockNorms(norm2),
                    head_norms=head_norms,
                    scale=self._scale,
                ),
                UncachedHeads(division, self._heads, self._shape.head_size),
            )
            for layer, (norm1, norm2), head_norms, division in zip(
                self._layers, self._norms, self._head_norms, self._divisions, strict=True
            )
        ]

    def _kept(self, norm: Affine) -> NormWeights:
        if self._norm == "rms_wide":
            return NormWeights(norm.weight)
        bias = None if norm.bias is None else norm.bias.to(self._dtype)
        return NormWeights(norm.weight.to(self._dtype), bias)

    def _kept_heads(self, layer: TowerLayer) -> QkNormWeights | None:
        if layer.q_norm is None or layer.k_norm is None:
            return None
        if self._norm == "rms_wide":
            both = NormWeights(layer.q_norm), NormWeights(layer.k_norm)
            return QkNormWeights(*both, self._eps, "rms_wide")
        query, key = (NormWeights(each.to(self._dtype)) for each in (layer.q_norm, layer.k_norm))
        return QkNormWeights(query, key, QK_EPS, over="token")


def _turned(heads: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate heads (T, N, D), or each half of one."""
    if turns[0].dim() == heads.dim():
        return apply_rotary(heads, *turns)
    return apply_rotary(heads.reshape(*heads.shape[:-1], 2, -1), *turns).flatten(-2)
