"""Multi-head latent attention (MLA): low-rank queries, keys and values from one latent.

Axes: T tokens, Q query heads on this rank; the sizes C, O, R and V as in `antiphon.kernels.latent`.

Source: DeepSeek-AI 2024, arXiv:2405.04434, section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from antiphon.layers.context import LatentAttentionParams
from antiphon.layers.linear import (
    ColumnLinear,
    LinearPart,
    ReplicatedLinear,
    RowLinear,
    weight_sources,
)
from antiphon.layers.methods import LinearShape, RankSlice
from antiphon.layers.norm import NormSpec, build_norm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from antiphon.kernels.latent import LatentSizes
    from antiphon.kernels.rotary import RotarySpec
    from antiphon.layers.context import ForwardContext
    from antiphon.layers.methods import LinearWeights
    from antiphon.layers.sublayer import LayerBuildContext
    from antiphon.layers.weights import WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentNames:
    """Names of a layer's tensors in the checkpoint, relative to the layer.

    Attributes:
        query: From the hidden size to the heads, where queries are not low-rank.
        query_down, query_norm, query_up: Through the queries' latent, where they are.
        down, norm, up: To the latent and the rotated key, of the latent, and to the heads.
    """

    query: str = "self_attn.q_proj"
    query_down: str = "self_attn.q_a_proj"
    query_norm: str = "self_attn.q_a_layernorm"
    query_up: str = "self_attn.q_b_proj"
    down: str = "self_attn.kv_a_proj_with_mqa"
    norm: str = "self_attn.kv_a_layernorm"
    up: str = "self_attn.kv_b_proj"
    out: str = "self_attn.o_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Multi-head latent attention.

    Attributes:
        sizes: Of the whole layer with all its heads.
        scale: Of scores.
        rotary: RoPE of the position part of queries and keys.
        interleaved_rope: Whether RoPE pairs are adjacent elements, not in two halves.
        query_latent: Size of the queries' latent; None: queries are not low-rank.
        norm: Of latents.
        bias: Of the projections to latents, and of the output projection.
    """

    sizes: LatentSizes
    scale: float
    rotary: RotarySpec
    interleaved_rope: bool
    query_latent: int | None
    norm: NormSpec
    bias: bool = False
    names: LatentNames = field(default_factory=LatentNames)

    @property
    def query_heads(self) -> int:
        """Of all ranks together."""
        return self.sizes.heads

    @property
    def cache(self) -> LatentSizes:
        """The cache of each token."""
        return self.sizes


class LatentQueries:
    """Queries of all heads, through a latent if they are low-rank."""

    def __init__(self, site: LayerBuildContext, spec: LatentSpec) -> None:
        build, method, names = site.build, site.method, spec.names
        inputs, name = site.hidden, names.query
        self._down = self._norm = None
        if spec.query_latent is not None:
            inputs, name = spec.query_latent, names.query_up
            down = site.tensor_name(names.query_down)
            self._down = ReplicatedLinear(
                down, site.hidden, inputs, bias=spec.bias, build=build, method=method
            )
            self._norm = build_norm(spec.norm, site.tensor_name(names.query_norm), inputs, build)
        outputs = spec.sizes.heads * (spec.sizes.content + spec.sizes.position)
        part = LinearPart(site.tensor_name(name), outputs, build.tp.ranks)
        self._up = ColumnLinear(part.name, inputs, (part,), bias=False, build=build, method=method)

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """Project: x (T, hidden)  ->  (T, Q * (C + O))."""
        if self._down is not None and self._norm is not None:
            x = self._norm(ctx, self._down(ctx, x))
        return self._up(ctx, x)

    def sources(self) -> Iterator[WeightSource]:
        """The tensors of its linears."""
        for part in (self._down, self._norm, self._up):
            if part is not None:
                yield from part.sources()

    def pack(self) -> None:
        """Prepare weights for computing; called once all sources are loaded."""
        self._up.pack()
        if self._down is not None:
            self._down.pack()


class LatentUpProjection:
    """The projection from a latent to the heads' keys and values, in both forms; a `LatentHeads`.

    The absorbed form multiplies by parts of the same weight, one head at a time and, for keys,
    transposed; it has a copy of them.
    """

    def __init__(self, site: LayerBuildContext, spec: LatentSpec) -> None:
        build, method, sizes = site.build, site.method, spec.sizes
        self._name, self._sizes = site.tensor_name(spec.names.up), sizes
        self._tp, self._device = build.tp, build.device
        self._heads = build.share(sizes.heads, self._name)
        self._method = method = build.method((self._name,), method)
        self._build = build
        self._per_head = sizes.content + sizes.value
        outputs = self._heads * self._per_head
        self._weights = method.create(LinearShape(sizes.latent, outputs, bias=False), build)
        # Weights that are read back are already quantized, if the method quantizes.
        self._exact = method.exact()
        absorb = LinearShape(sizes.content, sizes.latent, bias=False)
        restore = LinearShape(sizes.latent, sizes.value, bias=False)
        self._absorb = [self._exact.create(absorb, build) for _ in range(self._heads)]
        self._restore = [self._exact.create(restore, build) for _ in range(self._heads)]

    def expand(self, latents: Tensor) -> Tensor:
        """Compute contents of keys, and values: (N, R)  ->  (N, Q, C + V)."""
        return self._method.apply(self._weights, latents).view(len(latents), self._heads, -1)

    def absorb(self, content: Tensor) -> Tensor:
        """Project queries so that they attend to latents directly: (T, Q, C)  ->  (T, Q, R)."""
        return self._by_head(self._absorb, content)

    def restore(self, mixed: Tensor) -> Tensor:
        """Compute values from attended latents: (T, Q, R)  ->  (T, Q, V)."""
        return self._by_head(self._restore, mixed)

    def sources(self) -> Iterator[WeightSource]:
        """The weight."""
        outputs = self._heads * self._per_head
        first = self._tp.rank * outputs
        cut = RankSlice(slice(first, first + outputs), slice(None), into=0)
        part = LinearPart(self._name, self._sizes.heads * self._per_head, shards=1)
        yield from weight_sources(
            part, self._sizes.latent, cut, self._build, self._method, self._weights
        )

    def pack(self) -> None:
        """Prepare the weight for both forms; called once it is loaded."""
        self._method.pack(self._weights)
        outputs = torch.arange(self._per_head, device=self._device)
        for head in range(self._heads):
            weight = self._method.rows(self._weights, outputs + head * self._per_head)
            self._fill(self._absorb[head], weight[: self._sizes.content].T)
            self._fill(self._restore[head], weight[self._sizes.content :])

    def _fill(self, weights: LinearWeights, weight: Tensor) -> None:
        cut = RankSlice(slice(None), slice(None), into=0)
        self._exact.load(weights, "weight", weight.contiguous(), cut)
        self._exact.pack(weights)

    def _by_head(self, linears: list[LinearWeights], x: Tensor) -> Tensor:
        made = [
            self._exact.apply(linear, x[:, head].contiguous())
            for head, linear in enumerate(linears)
        ]
        return torch.stack(made, dim=1)


class LatentAttention:
    """Attention whose cache has one latent and one rotated key a token, for all heads."""

    operations = frozenset({"norm.rmsnorm", "attention.paged"})

    def __init__(self, site: LayerBuildContext, spec: LatentSpec) -> None:
        build, names, sizes = site.build, spec.names, spec.sizes
        self._layer, self._spec = site.layer, spec
        self._heads = build.share(sizes.heads, site.name)
        self._query = LatentQueries(site, spec)
        self._down = ReplicatedLinear(
            site.tensor_name(names.down),
            site.hidden,
            sizes.head_size,
            bias=spec.bias,
            build=build,
            method=site.method,
        )
        self._norm = build_norm(spec.norm, site.tensor_name(names.norm), sizes.latent, build)
        self._up = LatentUpProjection(site, spec)
        self._out = RowLinear(
            site.tensor_name(names.out),
            sizes.heads * sizes.value,
            site.hidden,
            bias=spec.bias,
            build=build,
            method=site.method,
        )
        self._params = LatentAttentionParams(scale=spec.scale, rotary=spec.rotary, heads=self._up)

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """Apply attention: x (T, hidden)  ->  (T, hidden)."""
        sizes = self._spec.sizes
        q = self._query(ctx, x).view(len(x), self._heads, -1)  # (T, Q, C + O)
        content, turned = q[..., : sizes.content], q[..., sizes.content :]
        down = self._down(ctx, x)
        latents, shared = down[:, : sizes.latent], down[:, sizes.latent :]
        assert ctx.attend_latent is not None, "a pass without a latent cache"
        mixed = ctx.attend_latent(
            self._layer,
            torch.cat((content, self._halves(turned)), dim=2),
            torch.cat((self._norm(ctx, latents.contiguous()), self._halves(shared)), dim=1),
            self._params,
        )
        return self._out(ctx, mixed.flatten(1))

    def sources(self) -> Iterator[WeightSource]:
        """The tensors of all parts."""
        for part in (self._query, self._down, self._norm, self._up, self._out):
            yield from part.sources()

    def pack(self) -> None:
        """Prepare weights for computing; called once all sources are loaded."""
        for part in (self._query, self._down, self._up, self._out):
            part.pack()

    def _halves(self, turned: Tensor) -> Tensor:
        """Permute interleaved pairs to halves, in queries and keys alike: their products are equal.

        Of the outputs and not of the weights: those may be quantized in blocks.
        """
        if not self._spec.interleaved_rope:
            return turned
        return torch.cat((turned[..., ::2], turned[..., 1::2]), dim=-1)
