"""The gated feed-forward block."""

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
class MlpShape:
    """Sizes of a gated block, and the checkpoint's names of its three linears."""

    hidden: int
    width: int
    bias: bool
    gate: str
    up: str
    down: str


class GatedMlp:
    """down(silu(gate(x)) * up(x)), gate and up as one linear."""

    def __init__(self, name: str, shape: MlpShape, build: Build, method: LinearMethod) -> None:
        ranks = build.tp.ranks
        build.share(shape.width, name)
        parts = (Part(shape.gate, shape.width, ranks), Part(shape.up, shape.width, ranks))
        self._gate_up = ColumnLinear(
            f"{name}.gate_up",
            shape.hidden,
            parts,
            bias=shape.bias,
            build=build,
            method=method,
            halves=True,
        )
        self._down = RowLinear(
            shape.down, shape.width, shape.hidden, bias=shape.bias, build=build, method=method
        )

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """Transform x (T, hidden)  ->  (T, hidden)."""
        return self._down(ctx, ctx.ops.silu_mul(self._gate_up(ctx, x)))

    @property
    def packed(self) -> tuple[Linear, Linear] | None:
        """Gate and up, and down, as the CPU's own kernels know them, if they do."""
        gate_up, down = self._gate_up.packed, self._down.packed
        return None if gate_up is None or down is None else (gate_up, down)

    def sources(self) -> Iterator[WeightSource]:
        """Tensors of the three linears."""
        yield from self._gate_up.sources()
        yield from self._down.sources()

    def pack(self) -> None:
        """Called once all sources are loaded."""
        self._gate_up.pack()
        self._down.pack()
