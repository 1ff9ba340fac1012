"""Dense feed-forward blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from antiphon.layers.linear import CheckpointLayout, ColumnLinear, LinearPart, RowLinear

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from antiphon.kernels.activation import ActivationKind
    from antiphon.kernels.cpu.linear import CompiledLinear
    from antiphon.layers.context import ForwardContext
    from antiphon.layers.sublayer import LayerBuildContext
    from antiphon.layers.weights import WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMlpSpec:
    """down(activation(gate(x)) * up(x)).

    Attributes:
        width: Outputs of the gate.
        bias: Whether the three linears have one.
        gate, up, down: Names in the checkpoint, relative to the layer; one name for gate and up
            means a fused tensor, the gate first.
        scale_gate: Multiplier of the gate before its activation.
        scale_out: Multiplier of the result.
    """

    width: int
    activation: ActivationKind = "silu"
    bias: bool = False
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    scale_gate: float = 1.0
    scale_out: float = 1.0


class GatedMlp:
    """A gated block, with gate and up as one linear."""

    def __init__(self, site: LayerBuildContext, spec: GatedMlpSpec) -> None:
        build = site.build
        build.share(spec.width, f"{site.name}.mlp")
        names = (spec.gate, spec.up)
        fused = spec.gate == spec.up
        parts = tuple(
            LinearPart(
                site.tensor_name(name),
                spec.width,
                build.tp.ranks,
                CheckpointLayout(first=place * spec.width, run=2 * spec.width)
                if fused
                else CheckpointLayout(),
            )
            for place, name in enumerate(names)
        )
        self._activation: ActivationKind = spec.activation
        self._scales = spec.scale_gate, spec.scale_out
        self._gate_up = ColumnLinear(
            f"{site.name}.mlp.gate_up",
            site.hidden,
            parts,
            bias=spec.bias,
            build=build,
            method=site.method,
            halves=True,
        )
        self._down = RowLinear(
            site.tensor_name(spec.down),
            spec.width,
            site.hidden,
            bias=spec.bias,
            build=build,
            method=site.method,
        )

    @property
    def operations(self) -> frozenset[str]:
        """The kernel of the gate."""
        silu = self._activation == "silu"
        return frozenset({"activation.silu_mul" if silu else "activation.gate"})

    @property
    def fusable(self) -> bool:
        """Whether the CPU kernels support its gate."""
        return self._activation == "silu" and self._scales == (1.0, 1.0)

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """Apply the block: x (T, hidden)  ->  (T, hidden)."""
        both = self._gate_up(ctx, x)
        if self.fusable:
            return self._down(ctx, ctx.ops.silu_mul(both))
        scale_gate, scale_out = self._scales
        if scale_gate != 1.0:
            both[:, : both.shape[1] // 2] *= scale_gate
        if self._activation == "silu":
            y = self._down(ctx, ctx.ops.silu_mul(both))
        else:
            y = self._down(ctx, ctx.ops.gate(both, self._activation))
        return y if scale_out == 1.0 else y * scale_out

    @property
    def packed(self) -> tuple[CompiledLinear, CompiledLinear] | None:
        """Gate and up, and down, in packed form for the CPU kernels, if they are packed."""
        gate_up, down = self._gate_up.packed, self._down.packed
        return None if gate_up is None or down is None else (gate_up, down)

    def sources(self) -> Iterator[WeightSource]:
        """The tensors of the three linears."""
        yield from self._gate_up.sources()
        yield from self._down.sources()

    def pack(self) -> None:
        """Prepare weights for computing; called once all sources are loaded."""
        self._gate_up.pack()
        self._down.pack()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainMlpSpec:
    """down(activation(up(x))).

    Attributes:
        width: Outputs of the first linear.
        bias: Whether both linears have one.
        transposed: Whether weights in the checkpoint are (inputs, outputs).
        up, down: Names in the checkpoint, relative to the layer.
    """

    width: int
    activation: ActivationKind
    bias: bool = False
    transposed: bool = False
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"


class PlainMlp:
    """Two linears with an activation between them."""

    def __init__(self, site: LayerBuildContext, spec: PlainMlpSpec) -> None:
        stored = CheckpointLayout(transposed=spec.transposed)
        ranks = site.build.tp.ranks
        site.build.share(spec.width, f"{site.name}.mlp")
        self._activation: ActivationKind = spec.activation
        self._up = ColumnLinear(
            f"{site.name}.mlp.up",
            site.hidden,
            (LinearPart(site.tensor_name(spec.up), spec.width, ranks, stored),),
            bias=spec.bias,
            build=site.build,
            method=site.method,
        )
        self._down = RowLinear(
            site.tensor_name(spec.down),
            spec.width,
            site.hidden,
            bias=spec.bias,
            build=site.build,
            method=site.method,
            stored=stored,
        )

    operations = frozenset({"activation.plain"})

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """Apply the block: x (T, hidden)  ->  (T, hidden)."""
        return self._down(ctx, ctx.ops.activate(self._up(ctx, x), self._activation))

    def sources(self) -> Iterator[WeightSource]:
        """The tensors of both linears."""
        yield from self._up.sources()
        yield from self._down.sources()

    def pack(self) -> None:
        """Prepare weights for computing; called once all sources are loaded."""
        self._up.pack()
        self._down.pack()
