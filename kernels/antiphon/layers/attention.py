"""The attention block: QKV projection, QK norms, attention in the context, output projection."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch

from antiphon.kernels.attention import NoCache
from antiphon.kernels.kv import KvSpec
from antiphon.kernels.rotary import QkNormWeights, RotarySpec, Temperature
from antiphon.layers.context import AttentionParams, ForwardContext
from antiphon.layers.linear import CheckpointLayout, LinearPart
from antiphon.layers.sublayer import LayerBuildContext, Sublayer
from antiphon.layers.weights import Module, WeightSource, void

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from antiphon.kernels.cpu.linear import CompiledLinear
    from antiphon.layers.norm import NormSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionNames:
    """Names of a layer's tensors in the checkpoint, relative to the layer.

    One name for query, key and value means a fused tensor.
    """

    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    out: str = "self_attn.o_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    by_head: bool = False  # query, key and value of each head together in a fused tensor
    transposed: bool = False  # whether weights are (inputs, outputs)

    @property
    def fused(self) -> bool:
        return self.query == self.key == self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Grouped-query attention over a KV cache, or bidirectional attention over complete texts."""

    query_heads: int
    kv_heads: int
    head_size: int
    scale: float  # of scores, `head_size ** -0.5` in most models
    rotary: RotarySpec | None  # RoPE of queries and keys; None: no RoPE (NoPE)
    # Whether a query attends only to earlier tokens. If not, attention is bidirectional: nothing is
    # cached, and a text is computed in one forward pass.
    causal: bool = True
    # Whether the checkpoint has interleaved RoPE: pairs are adjacent elements.
    interleaved_rope: bool = False
    # A query attends to itself and the window - 1 tokens before it, and to as many after it if
    # bidirectional; None: to all.
    window: int | None = None
    # Chunked attention: texts are split into chunks of `window` tokens, and a query attends only
    # within its chunk.
    chunked: bool = False
    temperature: Temperature | None = None  # scale of the scores of late queries; None: none
    qkv_bias: bool = False
    key_bias: bool = True  # whether keys have one where queries and values have
    out_bias: bool = False
    qk_norm: NormSpec | None = None  # of queries and keys, before RoPE
    # What is normalised together: each head, or all heads of a token.
    qk_norm_over: Literal["head", "token"] = "head"
    value_norm: NormSpec | None = None  # of the values of each head, without weights
    # The layer before it whose keys and values it attends to, and whose cache is as its own would
    # be; None: it has its own.
    kv_layer: int | None = None
    # Whether tokens of an image attend to each other in both directions, in models in which they
    # do somewhere.
    image_ahead: bool = True
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    # Whether each query head has an attention sink: a learned score without a value.
    sinks: bool = False
    # Whether the output of each head is multiplied by the sigmoid of its own gate, which follows
    # the head's query in the checkpoint's tensor.
    gated: bool = False
    names: AttentionNames = field(default_factory=AttentionNames)
    inputs: int | None = None  # width of what it reads; None: that of the residual stream

    @property
    def cache(self) -> KvSpec | NoCache:
        if not self.causal:
            return NoCache()
        chunked = self.chunked and self.window is not None
        return KvSpec(
            heads=self.kv_heads, head_size=self.head_size, window=self.window, chunked=chunked
        )


class Attention(Sublayer):
    """Grouped-query attention. Axes: T tokens, Q query heads, H kv heads, D head size.

    A layer that attends to the keys and values of another one has no kv heads.
    """

    def __init__(self, site: LayerBuildContext, spec: AttentionSpec) -> None:
        build, names = site.build, spec.names
        self._layer = site.layer
        self._head_size = spec.head_size
        self.gated = spec.gated
        query_heads = build.share(spec.query_heads, f"{site.name}.attention")
        self._qkv = site.column(
            "attention.qkv", _parts(site, spec), bias=spec.qkv_bias, inputs=spec.inputs
        )
        self._out = site.row(
            names.out,
            spec.query_heads * spec.head_size,
            bias=spec.out_bias,
            stored=CheckpointLayout(transposed=names.transposed),
        )
        self.temperature = spec.temperature
        self._norms = None if spec.qk_norm is None else build_qk_norm(site, spec, spec.qk_norm)
        self._value_norm = None
        if spec.value_norm is not None:
            assert not spec.value_norm.affine, "norms of values have no weights"
            assert spec.kv_layer is None, "there are no values"
            self._value_norm = site.norm(spec.value_norm, "", spec.head_size)
        self.children = (self._qkv, self._out, self._norms, self._value_norm)
        first = build.tp.rank * query_heads
        self._share = slice(first, first + query_heads)
        self._sinks_name, self._query_heads = site.tensor_name(names.sinks), spec.query_heads
        self.params = AttentionParams(
            scale=spec.scale,
            rotary=spec.rotary,
            norms=self.head_norms if spec.causal else None,
            softcap=spec.softcap,
            sinks=build.empty(query_heads) if spec.sinks else None,
            kv_heads=0 if spec.kv_layer is not None else max(1, spec.kv_heads // build.tp.ranks),
            kv_layer=spec.kv_layer,
            image_ahead=spec.image_ahead,
            window=spec.window,
        )
        """The attention parameters, independent of the forward pass."""
        shaped = spec.softcap is not None or spec.sinks
        assert spec.causal or not shaped, "no kernel has it"
        assert spec.causal or spec.kv_layer is None, "only a cache is shared"
        self.kernels = frozenset({"attention.whole"})
        if spec.causal:
            self.kernels = frozenset({"attention.paged"})
        if spec.causal and spec.kv_layer is None:
            self.kernels |= {"attention.heads"}
        if spec.gated:
            self.kernels |= {"activation.sigmoid_mul"}

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        heads = self._qkv(ctx, x).view(len(x), -1, self._head_size)  # (T, Q + 2 H, D)
        gate = None
        if self.gated:
            own = heads.shape[1] - (self._share.stop - self._share.start)
            heads, gate = heads[:, :own], heads[:, own:]
        if self._norms is not None and self.params.norms is None:
            heads = self._norms(ctx, heads)
        if self._value_norm is not None:
            values = heads[:, -self.params.kv_heads :]
            values.copy_(self._value_norm(ctx, values.flatten(0, 1)).view(values.shape))
        if self.temperature is not None:
            heads = self._tempered(ctx, heads, self.temperature)
        mixed = ctx.attend(self._layer, heads, self.params)  # (T, Q, D)
        if gate is not None:
            mixed = ctx.ops.sigmoid_mul(mixed, gate)
        return self._out(ctx, mixed.flatten(1))

    def _tempered(self, ctx: ForwardContext, heads: Tensor, temperature: Temperature) -> Tensor:
        assert ctx.positions is not None, "a temperature by position"
        queries = self._share.stop - self._share.start
        factor = temperature.of(ctx.positions)[:, None, None]
        grown = (heads[:, :queries] * factor).to(heads.dtype)
        return torch.cat((grown, heads[:, queries:]), dim=1)

    @property
    def packed(self) -> tuple[CompiledLinear, CompiledLinear] | None:
        qkv, out = self._qkv.packed, self._out.packed
        return None if qkv is None or out is None else (qkv, out)

    @property
    def head_norms(self) -> QkNormWeights | None:
        return None if self._norms is None else self._norms.weights

    @property
    def unfused(self) -> str | None:
        """What of it the fused decoder does not have; None: nothing."""
        if self.params.kv_layer is not None:
            return "keys and values of another layer"
        if self._value_norm is not None:
            return "norms of values"
        over_ranks = self._norms is not None and self._norms.weights is None
        return "QK norms over ranks" if over_ranks else None

    def sources(self) -> Iterator[WeightSource]:
        yield from super().sources()
        if (sinks := self.params.sinks) is not None:
            yield WeightSource(
                self._sinks_name,
                (self._query_heads,),
                lambda tensor: void(sinks.copy_(tensor[self._share])),
            )


def _parts(site: LayerBuildContext, spec: AttentionSpec) -> tuple[LinearPart, ...]:
    names, ranks = spec.names, site.build.tp.ranks
    # With fewer kv heads than ranks, adjacent ranks have copies of the same head.
    shards = min(ranks, spec.kv_heads)
    heads = (spec.query_heads, spec.kv_heads, spec.kv_heads, spec.query_heads)
    tensors = (names.query, names.key, names.value) + ((names.query,) if spec.gated else ())
    if spec.kv_layer is not None:
        assert not names.fused, "queries have a tensor of their own"
        assert not spec.gated, "queries have it alone"
        tensors = (names.query,)
    turned = spec.rotary.size if spec.interleaved_rope and spec.rotary is not None else 0
    parts: list[LinearPart] = []
    for place, name in enumerate(tensors):
        run, first, runs = _fused_place(spec, place)
        stored = CheckpointLayout(
            run=run,
            first=first,
            runs=runs,
            transposed=names.transposed,
            interleaved_size=turned if place < 2 else 0,
            head_size=spec.head_size,
        )
        outputs = heads[place] * spec.head_size
        cut = shards if place in (1, 2) else ranks
        biased = place != 1 or spec.key_bias
        parts.append(LinearPart(site.tensor_name(name), outputs, cut, stored, biased))
    return tuple(parts)


def _fused_place(spec: AttentionSpec, place: int) -> tuple[int | None, int, int]:
    size = spec.head_size
    if spec.gated and place in (0, 3):
        assert not spec.names.fused, "a gate lies beside its query alone"
        return 2 * size, (size if place == 3 else 0), spec.query_heads
    if not spec.names.fused:
        return None, 0, 1
    if spec.names.by_head:
        assert spec.query_heads == spec.kv_heads, "a head has a query, a key and a value"
        return 3 * size, place * size, spec.kv_heads
    first = (0, spec.query_heads, spec.query_heads + spec.kv_heads)[place]
    return (spec.query_heads + 2 * spec.kv_heads) * size, first * size, 1


class QkNorm(Module):
    """Norms of queries and keys, of each head or of all heads of a token."""

    # For the kernel that normalises, rotates and stores; None: this module normalises.
    weights: QkNormWeights | None = None

    def __call__(self, ctx: ForwardContext, heads: Tensor) -> Tensor:
        """Normalise heads (T, Q + 2 H, D), queries before keys before values."""
        raise NotImplementedError


def build_qk_norm(site: LayerBuildContext, spec: AttentionSpec, norm: NormSpec) -> QkNorm:
    if spec.kv_layer is not None:
        return QueryNorm(site, spec, norm)
    if spec.qk_norm_over == "token" and site.build.tp.ranks > 1:
        return ShardedQkNorm(site, spec, norm)
    return WholeQkNorm(site, spec, norm)


class QueryNorm(QkNorm):
    """The norm of each query, in a layer without keys of its own."""

    def __init__(self, site: LayerBuildContext, spec: AttentionSpec, norm: NormSpec) -> None:
        assert spec.qk_norm_over == "head", "ranks have whole heads"
        self._norm = site.norm(norm, spec.names.query_norm, spec.head_size)
        self.children = (self._norm,)

    def __call__(self, ctx: ForwardContext, heads: Tensor) -> Tensor:
        return self._norm(ctx, heads.flatten(0, 1)).view(heads.shape)


class WholeQkNorm(QkNorm):
    """Norms whose rows are whole on this rank."""

    def __init__(self, site: LayerBuildContext, spec: AttentionSpec, norm: NormSpec) -> None:
        whole = spec.qk_norm_over == "token"
        self._groups = spec.query_heads // spec.kv_heads
        self._norms = tuple(
            site.norm(norm, name, (heads if whole else 1) * spec.head_size)
            for name, heads in (
                (spec.names.query_norm, spec.query_heads),
                (spec.names.key_norm, spec.kv_heads),
            )
        )
        self.children = self._norms
        query, key = (each.weights for each in self._norms)
        assert query is not None, "norms of heads have weights"
        assert key is not None, "norms of heads have weights"
        self.weights = QkNormWeights(query, key, norm.eps, norm.kernel, spec.qk_norm_over)
        self._whole = whole

    def __call__(self, ctx: ForwardContext, heads: Tensor) -> Tensor:
        q, k, v = _parted(heads, self._groups)
        parts = [
            norm(ctx, part.flatten(1) if self._whole else part.flatten(0, 1)).view(part.shape)
            for norm, part in zip(self._norms, (q, k), strict=True)
        ]
        return torch.cat((*parts, v), dim=1)


class ShardedQkNorm(QkNorm):
    """RMSNorm over all queries of a token, and over all its keys, where ranks share the heads.

    The mean square is summed over ranks.
    """

    kernels = frozenset({"norm.squares"})

    def __init__(self, site: LayerBuildContext, spec: AttentionSpec, norm: NormSpec) -> None:
        assert norm.kind in ("rms", "rms_wide"), "no other kind is cut over ranks"
        build, ranks = site.build, site.build.tp.ranks
        if spec.kv_heads % ranks:
            # Replicated heads would be counted twice.
            raise ValueError(f"{site.name}: {spec.kv_heads} normalised key heads on {ranks} ranks")
        self._eps = norm.eps
        self._wide = norm.kind == "rms_wide"
        self._groups = spec.query_heads // spec.kv_heads
        sizes = (spec.query_heads * spec.head_size, spec.kv_heads * spec.head_size)
        self._names = (
            site.tensor_name(spec.names.query_norm),
            site.tensor_name(spec.names.key_norm),
        )
        self._sizes, self._rank, self._ranks = sizes, build.tp.rank, ranks
        self._weights = tuple(build.empty(size // ranks) for size in sizes)

    def __call__(self, ctx: ForwardContext, heads: Tensor) -> Tensor:
        q, k, v = _parted(heads, self._groups)
        parts = [
            self._normalised(ctx, part, weight)
            for part, weight in zip((q, k), self._weights, strict=True)
        ]
        return torch.cat((*parts, v), dim=1)

    def sources(self) -> Iterator[WeightSource]:
        for name, size, weight in zip(self._names, self._sizes, self._weights, strict=True):
            yield WeightSource(f"{name}.weight", (size,), partial(self._load, weight))

    def _load(self, weight: Tensor, tensor: Tensor) -> None:
        weight.copy_(tensor.chunk(self._ranks)[self._rank])

    def _normalised(self, ctx: ForwardContext, heads: Tensor, weight: Tensor) -> Tensor:
        rows = heads.flatten(1)
        mean = ctx.tp.all_reduce(ctx.ops.squares(rows)) / (rows.shape[1] * self._ranks)
        unit = rows.float() * torch.rsqrt(mean + self._eps)
        if self._wide:
            return (unit * weight.float()).to(heads.dtype).view(heads.shape)
        return (unit.to(heads.dtype) * weight).view(heads.shape)


def _parted(heads: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    kv = heads.shape[1] // (groups + 2)
    queries = groups * kv
    return heads[:, :queries], heads[:, queries : queries + kv], heads[:, queries + kv :]
