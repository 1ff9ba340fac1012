"""Multi-head latent attention (MLA): low-rank queries, keys and values from one latent.

Axes: T tokens, Q query heads on this rank; the sizes C, O, R and V as in `antiphon.kernels.latent`.

Source: DeepSeek-AI 2024, arXiv:2405.04434, section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from antiphon.kernels.cpu.fused_decoder import FusedLatent
from antiphon.kernels.cpu.linear import head_linears
from antiphon.layers.context import ForwardContext, LatentAttentionParams
from antiphon.layers.linear import ColumnLinear, LinearPart, weight_sources
from antiphon.layers.methods import (
    WHOLE_SLICE,
    LinearMethod,
    LinearShape,
    LinearWeights,
    PlainWeights,
    RankSlice,
)
from antiphon.layers.sublayer import LayerBuildContext, Sublayer
from antiphon.layers.weights import Module, WeightSource

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from antiphon.kernels.cpu.linear import CompiledHeadLinears, CompiledLinear
    from antiphon.kernels.latent import LatentOps, LatentSizes
    from antiphon.kernels.norm import NormKind
    from antiphon.kernels.rotary import RotarySpec
    from antiphon.layers.norm import Norm, NormSpec
    from antiphon.layers.weights import BuildContext


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Multi-head latent attention."""

    sizes: LatentSizes  # of the whole layer with all its heads
    scale: float  # of scores
    rotary: RotarySpec  # RoPE of the position part of queries and keys
    interleaved_rope: bool  # whether RoPE pairs are adjacent elements, not in two halves
    query_latent: int | None  # size of the queries' latent; None: queries are not low-rank
    norm: NormSpec  # of latents
    bias: bool = False  # of the projections to latents, and of the output projection

    @property
    def query_heads(self) -> int:
        return self.sizes.heads

    @property
    def cache(self) -> LatentSizes:
        return self.sizes


class LatentQueries(Module):
    def __init__(self, site: LayerBuildContext, spec: LatentSpec) -> None:
        build, method = site.build, site.method
        inputs, name = site.hidden, "self_attn.q_proj"
        self._down = self._norm = None
        if spec.query_latent is not None:
            inputs, name = spec.query_latent, "self_attn.q_b_proj"
            self._down = site.replicated("self_attn.q_a_proj", inputs, bias=spec.bias)
            self._norm = site.norm(spec.norm, "self_attn.q_a_layernorm", inputs)
        outputs = spec.sizes.heads * (spec.sizes.content + spec.sizes.position)
        part = LinearPart(site.tensor_name(name), outputs, build.tp.ranks)
        self._up = ColumnLinear(part.name, inputs, (part,), bias=False, build=build, method=method)
        self.children = (self._down, self._norm, self._up)

    @property
    def down(self) -> tuple[CompiledLinear | None, Norm] | None:
        """The projection to the queries' latent, and its norm; None: there is no such latent."""
        if self._down is None or self._norm is None:
            return None
        return self._down.packed, self._norm

    @property
    def up(self) -> CompiledLinear | None:
        return self._up.packed

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        if self._down is not None and self._norm is not None:
            x = self._norm(ctx, self._down(ctx, x))
        return self._up(ctx, x)


class LatentUpProjection(Module):
    """The projection from a latent to the heads' keys and values, in both forms; a `LatentHeads`.

    The absorbed form multiplies by parts of the same weight, one head at a time and, for keys,
    transposed; it has a copy of them.
    """

    def __init__(self, site: LayerBuildContext, spec: LatentSpec) -> None:
        build, method, sizes = site.build, site.method, spec.sizes
        self._name, self._sizes = site.tensor_name("self_attn.kv_b_proj"), sizes
        self._heads = build.share(sizes.heads, self._name)
        self._build = build
        self._per_head = sizes.content + sizes.value
        outputs = self._heads * self._per_head
        shape = LinearShape(sizes.latent, outputs, bias=False)
        self._weights = build.create((self._name,), shape, method, sizes.latent)
        # Weights that are read back are already quantized, if the method quantizes.
        exact = build.tensor_method((self._name,), method).exact()
        absorb = LinearShape(sizes.content, sizes.latent, bias=False)
        restore = LinearShape(sizes.latent, sizes.value, bias=False)
        self._absorb, self._restore = (
            HeadLinears(self._heads, shape, exact, build) for shape in (absorb, restore)
        )
        if exact is LinearMethod.TILED:
            self.kernels = frozenset({"linear.heads"})

    def expand(self, latents: Tensor) -> Tensor:
        return self._weights.apply(latents).view(len(latents), self._heads, -1)

    def absorb(self, ops: LatentOps, content: Tensor) -> Tensor:
        return self._absorb(ops, content)

    def restore(self, ops: LatentOps, mixed: Tensor) -> Tensor:
        return self._restore(ops, mixed)

    @property
    def compiled(self) -> tuple[CompiledHeadLinears, CompiledHeadLinears] | None:
        """Projections of heads to latents and back, where they are packed."""
        absorb, restore = self._absorb.compiled, self._restore.compiled
        return None if absorb is None or restore is None else (absorb, restore)

    def sources(self) -> Iterator[WeightSource]:
        outputs = self._heads * self._per_head
        first = self._build.tp.rank * outputs
        cut = RankSlice(slice(first, first + outputs), slice(None), into=0)
        part = LinearPart(self._name, self._sizes.heads * self._per_head, shards=1)
        yield from weight_sources(part, self._sizes.latent, cut, self._build, self._weights)

    def pack(self) -> None:
        outputs = torch.arange(self._per_head, device=self._build.device)
        for head in range(self._heads):
            weight = self._weights.rows(outputs + head * self._per_head)
            content, value = weight[: self._sizes.content], weight[self._sizes.content :]
            self._absorb.heads[head].load("weight", content.T.contiguous(), WHOLE_SLICE)
            self._restore.heads[head].load("weight", value.contiguous(), WHOLE_SLICE)


class HeadLinears:
    """A linear of its own for each head, in one call: packed for the CPU, of torch, or an op."""

    def __init__(
        self, count: int, shape: LinearShape, method: LinearMethod, build: BuildContext
    ) -> None:
        self.compiled: CompiledHeadLinears | None = None
        self._tiled = method is LinearMethod.TILED
        if method in (LinearMethod.PLAIN, LinearMethod.TILED):
            self._tables = build.empty(count, shape.outputs, shape.inputs)
            self.heads: list[LinearWeights] = [PlainWeights(table, None) for table in self._tables]
            return
        self.heads = [method.create(shape, build.dtype, build.device) for _ in range(count)]
        packed = [linear.packed for linear in self.heads if linear.packed is not None]
        assert len(packed) == count, "weights of heads are packed, or tensors"
        self.compiled = head_linears(packed)

    def __call__(self, ops: LatentOps, x: Tensor) -> Tensor:
        """Multiply: x (T, Q, I)  ->  (T, Q, O)."""
        if self.compiled is not None:
            return self.compiled.multiply(x)
        if self._tiled:
            return ops.linear_heads(x, self._tables)
        return torch.bmm(x.transpose(0, 1), self._tables.transpose(1, 2)).transpose(0, 1)


class LatentAttention(Sublayer):
    """Attention whose cache has one latent and one rotated key a token, for all heads."""

    kernels = frozenset({"norm.rmsnorm", "attention.latents", "attention.paged"})

    def __init__(self, site: LayerBuildContext, spec: LatentSpec) -> None:
        build, sizes = site.build, spec.sizes
        self._layer, self._spec = site.layer, spec
        self._heads = build.share(sizes.heads, site.name)
        self._query = LatentQueries(site, spec)
        self._down = site.replicated(
            "self_attn.kv_a_proj_with_mqa", sizes.head_size, bias=spec.bias
        )
        self._norm = site.norm(spec.norm, "self_attn.kv_a_layernorm", sizes.latent)
        self._up = LatentUpProjection(site, spec)
        self._out = site.row("self_attn.o_proj", sizes.heads * sizes.value, bias=spec.bias)
        self.children = (self._query, self._down, self._norm, self._up, self._out)
        self.params = LatentAttentionParams(
            scale=spec.scale, rotary=spec.rotary, heads=self._up, value=sizes.value
        )

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
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
            self.params,
        )
        return self._out(ctx, mixed.flatten(1))

    @property
    def norm_kernel(self) -> NormKind:
        """The kind of the norms of its latents."""
        return self._spec.norm.kernel

    @property
    def packed(self) -> tuple[FusedLatent, CompiledLinear] | None:
        """The layer for the fused decoder, and its output projection; None: it is not packed."""
        sizes, query, heads = self._spec.sizes, self._query, self._up.compiled
        up, down, out = query.up, self._down.packed, self._out.packed
        query_down, query_norm = query.down or (None, None)
        if up is None or down is None or out is None or heads is None:
            return None
        if query_norm is not None and query_down is None:
            return None
        assert self._norm.weights is not None, "norms of latents have weights"
        latent = FusedLatent(
            query_down=query_down,
            query_norm=query_norm and query_norm.weights and query_norm.weights.weight,
            query_eps=self._spec.norm.eps,
            query=up,
            down=down,
            norm=self._norm.weights.weight,
            eps=self._spec.norm.eps,
            absorb=heads[0],
            restore=heads[1],
            content=sizes.content,
            position=sizes.position,
            interleaved=self._spec.interleaved_rope,
        )
        return latent, out

    def _halves(self, turned: Tensor) -> Tensor:
        """Permute interleaved pairs to halves, in queries and keys alike: their products are equal.

        Of the outputs and not of the weights: those may be quantized in blocks.
        """
        if not self._spec.interleaved_rope:
            return turned
        return torch.cat((turned[..., ::2], turned[..., 1::2]), dim=-1)
