"""Attention of a decoder to another sequence, which an encoder has made: keys, values, queries.

Keys and values of that sequence are computed in the pass that brings it, once for a request, and
cached until the request leaves its slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from antiphon.kernels.kv import CrossKvSpec
from antiphon.layers.linear import LinearPart
from antiphon.layers.sublayer import LayerBuildContext, Sublayer

if TYPE_CHECKING:
    from torch import Tensor

    from antiphon.layers.context import ForwardContext


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossAttentionSpec:
    """Multi-head attention of each token to all of the other sequence, without positions."""

    heads: int
    head_size: int
    scale: float  # of scores
    source_tokens: int  # of the other sequence
    # Names of the linears in the checkpoint, relative to the layer. Keys have no bias.
    query: str = "encoder_attn.q_proj"
    key: str = "encoder_attn.k_proj"
    value: str = "encoder_attn.v_proj"
    out: str = "encoder_attn.out_proj"

    @property
    def cache(self) -> CrossKvSpec:
        return CrossKvSpec(
            heads=self.heads, head_size=self.head_size, source_tokens=self.source_tokens
        )


class CrossAttention(Sublayer):
    """Axes: T tokens, S tokens of other sequences that come with the pass, H heads, D head size.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.3.
    """

    kernels = frozenset({"attention.paged"})

    def __init__(self, site: LayerBuildContext, spec: CrossAttentionSpec) -> None:
        build, width = site.build, spec.heads * spec.head_size
        heads = build.share(spec.heads, f"{site.name}.encoder_attn")
        self._layer, self._heads, self._scale = site.layer, heads, spec.scale
        ranks = build.tp.ranks

        def part(name: str, *, biased: bool = True) -> LinearPart:
            return LinearPart(site.tensor_name(name), width, ranks, biased=biased)

        self._query = site.column("encoder_attn.query", (part(spec.query),), bias=True)
        self._key_value = site.column(
            "encoder_attn.key_value", (part(spec.key, biased=False), part(spec.value)), bias=True
        )
        self._out = site.row(spec.out, width, bias=True)
        self.children = (self._query, self._key_value, self._out)

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        cross = ctx.cross
        assert cross is not None, "a pass of a model with cross attention"
        if cross.sources is not None:
            made = self._key_value(ctx, cross.sources).view(len(cross.sources), 2, self._heads, -1)
            cross.store(self._layer, made[:, 0], made[:, 1])
        queries = self._query(ctx, x).view(len(x), self._heads, -1)  # (T, H, D)
        mixed = cross.attend(self._layer, queries, self._scale)  # (T, H, D)
        return self._out(ctx, mixed.flatten(1))
