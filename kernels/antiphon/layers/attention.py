"""The attention block: project, rotate and attend through the context, project back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from antiphon.layers.linear import ColumnLinear, Part, RowLinear

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from antiphon.kernels.cpu.linear import Linear
    from antiphon.layers.context import ForwardContext
    from antiphon.layers.methods import LinearMethod
    from antiphon.layers.weights import Build, WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Sizes of an attention block, and the checkpoint's names of its four linears."""

    hidden: int
    query_heads: int
    kv_heads: int
    head_size: int
    qkv_bias: bool
    out_bias: bool
    query: str
    key: str
    value: str
    out: str


class Attention:
    """Grouped-query attention with rotary positions. Axes: T tokens, Q query heads, H kv heads."""

    def __init__(
        self, name: str, layer: int, shape: AttentionShape, build: Build, method: LinearMethod
    ) -> None:
        self._layer = layer
        self._head_size = shape.head_size
        self._query_heads = build.share(shape.query_heads, name)
        # Fewer kv heads than ranks: neighbours hold copies of the same head.
        shards = min(build.tp.ranks, shape.kv_heads)
        self._kv_heads = shape.kv_heads // shards
        query_size = shape.query_heads * shape.head_size
        kv_size = shape.kv_heads * shape.head_size
        parts = (
            Part(shape.query, query_size, build.tp.ranks),
            Part(shape.key, kv_size, shards),
            Part(shape.value, kv_size, shards),
        )
        self._qkv = ColumnLinear(
            f"{name}.qkv", shape.hidden, parts, bias=shape.qkv_bias, build=build, method=method
        )
        self._out = RowLinear(
            shape.out, query_size, shape.hidden, bias=shape.out_bias, build=build, method=method
        )

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """Transform x (T, hidden)  ->  (T, hidden)."""
        heads = self._qkv(ctx, x).view(len(x), -1, self._head_size)  # (T, Q + 2 H, D)
        mixed = ctx.attend(self._layer, heads, None)  # (T, Q, D)
        return self._out(ctx, mixed.flatten(1))

    @property
    def packed(self) -> tuple[Linear, Linear] | None:
        """Its projections there and back as the CPU's own kernels know them, if they do."""
        qkv, out = self._qkv.packed, self._out.packed
        return None if qkv is None or out is None else (qkv, out)

    def sources(self) -> Iterator[WeightSource]:
        """Tensors of the four linears."""
        yield from self._qkv.sources()
        yield from self._out.sources()

    def pack(self) -> None:
        """Called once all sources are loaded."""
        self._qkv.pack()
        self._out.pack()
