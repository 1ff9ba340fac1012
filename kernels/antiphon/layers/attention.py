"""The attention block: QKV projection, attention through the context, output projection."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch

from antiphon.kernels.bidirectional import NoCache
from antiphon.kernels.kv import KvSpec
from antiphon.layers.context import AttentionParams
from antiphon.layers.linear import CheckpointLayout, ColumnLinear, LinearPart, RowLinear
from antiphon.layers.qk_norm import build_qk_norm
from antiphon.layers.weights import WeightSource, void

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from antiphon.kernels.cpu.linear import CompiledLinear
    from antiphon.kernels.rotary import RotarySpec
    from antiphon.layers.context import ForwardContext
    from antiphon.layers.norm import NormSpec
    from antiphon.layers.sublayer import LayerBuildContext


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionNames:
    """Names of a layer's tensors in the checkpoint, relative to the layer.

    Attributes:
        query, key, value: One name for all three means a fused tensor.
        by_head: Whether a fused tensor has the query, key and value of each head together, instead
            of all queries before all keys before all values.
        transposed: Whether weights are (inputs, outputs).
    """

    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    out: str = "self_attn.o_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    by_head: bool = False
    transposed: bool = False

    @property
    def fused(self) -> bool:
        """Whether queries, keys and values are one tensor."""
        return self.query == self.key == self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Grouped-query attention over a KV cache, or bidirectional attention over complete texts.

    Attributes:
        causal: Whether a query attends only to earlier tokens. If not, attention is bidirectional:
            nothing is cached, and a text is computed in one forward pass.
        scale: Of scores, `head_size ** -0.5` in most models.
        rotary: RoPE of queries and keys; None: no RoPE (NoPE).
        interleaved_rope: Whether the checkpoint has interleaved RoPE: pairs are adjacent elements.
        window: A query attends to itself and the window - 1 tokens before it, and to as many after
            it if bidirectional; None: to all.
        chunked: Chunked attention: texts are split into chunks of `window` tokens, and a query
            attends only within its chunk.
        temperature: Scale of the scores of late queries; None: none.
        qk_norm: Of queries and keys, before RoPE.
        qk_norm_over: What is normalised together: each head, or all heads of a token.
        softcap: Scores become softcap * tanh(score / softcap).
        sinks: Whether each query head has an attention sink: a learned score without a value.
        gated: Whether the output of each head is multiplied by the sigmoid of its own gate, which
            follows the head's query in the checkpoint's tensor.
    """

    query_heads: int
    kv_heads: int
    head_size: int
    scale: float
    rotary: RotarySpec | None
    causal: bool = True
    interleaved_rope: bool = False
    window: int | None = None
    chunked: bool = False
    temperature: Temperature | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: NormSpec | None = None
    qk_norm_over: Literal["head", "token"] = "head"
    softcap: float | None = None
    sinks: bool = False
    gated: bool = False
    names: AttentionNames = field(default_factory=AttentionNames)

    @property
    def cache(self) -> KvSpec | NoCache:
        """The cache of each token."""
        if not self.causal:
            return NoCache()
        chunked = self.chunked and self.window is not None
        return KvSpec(
            heads=self.kv_heads, head_size=self.head_size, window=self.window, chunked=chunked
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Temperature:
    """Scores of the query at position p are multiplied by 1 + scale * ln(1 + (p + 1) // floor).

    Source: Nakanishi 2025, arXiv:2501.19399, as used by Llama 4.
    """

    floor: int
    scale: float

    def of(self, positions: Tensor) -> Tensor:
        """The factor of each query: (T,) int32  ->  (T,) float32."""
        passed = torch.div(positions + 1, self.floor, rounding_mode="floor")
        return torch.log1p(passed.float()) * self.scale + 1.0


class Attention:
    """Grouped-query attention. Axes: T tokens, Q query heads, H kv heads, D head size."""

    def __init__(self, site: LayerBuildContext, spec: AttentionSpec) -> None:
        name, build, names = f"{site.name}.attention", site.build, spec.names
        self._layer = site.layer
        self._head_size = spec.head_size
        self._gated = spec.gated
        query_heads = build.share(spec.query_heads, name)
        self._qkv = ColumnLinear(
            f"{name}.qkv",
            site.hidden,
            _parts(site, spec),
            bias=spec.qkv_bias,
            build=build,
            method=site.method,
        )
        self._out = RowLinear(
            site.tensor_name(names.out),
            spec.query_heads * spec.head_size,
            site.hidden,
            bias=spec.out_bias,
            build=build,
            method=site.method,
            stored=CheckpointLayout(transposed=names.transposed),
        )
        self._causal, self._chunked = spec.causal, spec.chunked
        self._temperature = spec.temperature
        self._norms = None if spec.qk_norm is None else build_qk_norm(site, spec, spec.qk_norm)
        first = build.tp.rank * query_heads
        self._share = slice(first, first + query_heads)
        self._sinks_name, self._query_heads = site.tensor_name(names.sinks), spec.query_heads
        self.params = AttentionParams(
            scale=spec.scale,
            rotary=spec.rotary,
            norms=None if self._norms is None else self._norms.kernel,
            softcap=spec.softcap,
            sinks=build.empty(query_heads) if spec.sinks else None,
            kv_heads=max(1, spec.kv_heads // build.tp.ranks),
            window=spec.window,
        )
        """The attention parameters, independent of the forward pass."""
        shaped = spec.softcap is not None or spec.sinks or self.params.norms is not None
        assert spec.causal or not shaped, "no kernel has it"

    @property
    def operations(self) -> frozenset[str]:
        """The kernels of attention and of its norms."""
        params = self.params
        if not self._causal:
            return frozenset({"attention.whole"})
        shaped = params.softcap is not None or params.sinks is not None
        own = frozenset({"attention.heads", "attention.shaped" if shaped else "attention.paged"})
        return own if self._norms is None else own | self._norms.operations

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """Apply attention: x (T, hidden)  ->  (T, hidden)."""
        heads = self._qkv(ctx, x).view(len(x), -1, self._head_size)  # (T, Q + 2 H, D)
        gate = None
        if self._gated:
            own = heads.shape[1] - (self._share.stop - self._share.start)
            heads, gate = heads[:, :own], heads[:, own:]
        if self._norms is not None:
            heads = self._norms(ctx, heads)
        if self._temperature is not None:
            heads = self._tempered(ctx, heads, self._temperature)
        mixed = ctx.attend(self._layer, heads, self.params)  # (T, Q, D)
        if gate is not None:
            mixed = mixed * torch.sigmoid(gate)
        return self._out(ctx, mixed.flatten(1))

    def _tempered(self, ctx: ForwardContext, heads: Tensor, temperature: Temperature) -> Tensor:
        """Heads (T, Q + 2 H, D) with their queries scaled by the temperature."""
        assert ctx.positions is not None, "a temperature by position"
        queries = self._share.stop - self._share.start
        factor = temperature.of(ctx.positions)[:, None, None]
        grown = (heads[:, :queries] * factor).to(heads.dtype)
        return torch.cat((grown, heads[:, queries:]), dim=1)

    @property
    def packed(self) -> tuple[CompiledLinear, CompiledLinear] | None:
        """Both projections in packed form for the CPU kernels, if they are packed."""
        qkv, out = self._qkv.packed, self._out.packed
        return None if qkv is None or out is None else (qkv, out)

    @property
    def fusable(self) -> bool:
        """Whether the fused decoder supports it: neither soft cap, sinks nor further operations."""
        params = self.params
        own_norms = self._norms is not None and self._norms.kernel is None
        shaped = params.softcap is not None or params.sinks is not None
        other = self._gated or self._chunked or self._temperature is not None
        return self._causal and not (shaped or own_norms or other)

    def sources(self) -> Iterator[WeightSource]:
        """The tensors of the four linears, of norms and sinks."""
        yield from self._qkv.sources()
        yield from self._out.sources()
        if self._norms is not None:
            yield from self._norms.sources()
        if (sinks := self.params.sinks) is not None:
            yield WeightSource(
                self._sinks_name,
                (self._query_heads,),
                lambda tensor: void(sinks.copy_(tensor[self._share])),
            )

    def pack(self) -> None:
        """Prepare weights for computing; called once all sources are loaded."""
        self._qkv.pack()
        self._out.pack()


def _parts(site: LayerBuildContext, spec: AttentionSpec) -> tuple[LinearPart, ...]:
    """Queries, keys, values and gates: their names, sizes and layouts in the checkpoint."""
    names, ranks = spec.names, site.build.tp.ranks
    # With fewer kv heads than ranks, adjacent ranks have copies of the same head.
    shards = min(ranks, spec.kv_heads)
    heads = (spec.query_heads, spec.kv_heads, spec.kv_heads, spec.query_heads)
    tensors = (names.query, names.key, names.value) + ((names.query,) if spec.gated else ())
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
        parts.append(LinearPart(site.tensor_name(name), outputs, cut, stored))
    return tuple(parts)


def _fused_place(spec: AttentionSpec, place: int) -> tuple[int | None, int, int]:
    """Layout of queries (0), keys (1), values (2) or gates (3) in a tensor: run, first and runs."""
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
