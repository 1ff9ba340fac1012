"""Dense feed-forward blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from antiphon.layers.gate_cutoff import GateCutoff
from antiphon.layers.linear import CheckpointLayout, LinearPart
from antiphon.layers.sublayer import LayerBuildContext, Sublayer

if TYPE_CHECKING:
    from torch import Tensor

    from antiphon.kernels.activation import ActivationKind
    from antiphon.kernels.cpu.linear import CompiledLinear
    from antiphon.layers.context import ForwardContext


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMlpSpec:
    """down(activation(gate(x)) * up(x)).

    Names are relative to the layer; one name for gate and up means a fused tensor, the gate first.
    """

    width: int  # outputs of the gate
    activation: ActivationKind = "silu"
    bias: bool = False  # of the three linears
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    scale_gate: float = 1.0  # multiplier of the gate before its activation
    scale_out: float = 1.0  # multiplier of the result
    # Part of the gate's outputs that become zero before its activation, see `layers.gate_cutoff`.
    sparsity: float = 0.0


class GatedMlp(Sublayer):
    def __init__(self, site: LayerBuildContext, spec: GatedMlpSpec) -> None:
        site.build.share(spec.width, f"{site.name}.mlp")
        layouts = (CheckpointLayout(), CheckpointLayout())
        if spec.gate == spec.up:
            run = 2 * spec.width
            layouts = (CheckpointLayout(run=run), CheckpointLayout(run=run, first=spec.width))
        parts = tuple(
            LinearPart(site.tensor_name(name), spec.width, site.build.tp.ranks, layout)
            for name, layout in zip((spec.gate, spec.up), layouts, strict=True)
        )
        self.activation: ActivationKind = spec.activation
        self.scales = spec.scale_gate, spec.scale_out
        self._cutoff = GateCutoff(spec.sparsity, spec.width) if spec.sparsity > 0 else None
        self._gate_up = site.column("mlp.gate_up", parts, bias=spec.bias, halves=True)
        self._down = site.row(spec.down, spec.width, bias=spec.bias)
        self.children = (self._gate_up, self._down)
        silu = spec.activation == "silu"
        self.kernels = frozenset({"activation.silu_mul" if silu else "activation.gate"})

    @property
    def unscaled(self) -> bool:
        return self.scales == (1.0, 1.0)

    @property
    def sparse(self) -> bool:
        return self._cutoff is not None

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        both = self._gate_up(ctx, x)
        scale_gate, scale_out = self.scales
        if scale_gate != 1.0:
            both[:, : both.shape[1] // 2] *= scale_gate
        if self._cutoff is not None:
            gate = both[:, : both.shape[1] // 2]
            gate.copy_(self._cutoff(ctx, gate))
        if self.activation == "silu":
            y = self._down(ctx, ctx.ops.silu_mul(both))
        else:
            y = self._down(ctx, ctx.ops.gate(both, self.activation))
        return y if scale_out == 1.0 else y * scale_out

    @property
    def packed(self) -> tuple[CompiledLinear, CompiledLinear] | None:
        gate_up, down = self._gate_up.packed, self._down.packed
        return None if gate_up is None or down is None else (gate_up, down)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainMlpSpec:
    """down(activation(up(x))); names are relative to the layer."""

    width: int  # outputs of the first linear
    activation: ActivationKind
    bias: bool = False  # of both linears
    transposed: bool = False  # whether weights in the checkpoint are (inputs, outputs)
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"


class PlainMlp(Sublayer):
    kernels = frozenset({"activation.plain"})

    def __init__(self, site: LayerBuildContext, spec: PlainMlpSpec) -> None:
        stored = CheckpointLayout(transposed=spec.transposed)
        ranks = site.build.tp.ranks
        site.build.share(spec.width, f"{site.name}.mlp")
        self.activation: ActivationKind = spec.activation
        part = LinearPart(site.tensor_name(spec.up), spec.width, ranks, stored)
        self._up = site.column("mlp.up", (part,), bias=spec.bias)
        self._down = site.row(spec.down, spec.width, bias=spec.bias, stored=stored)
        self.children = (self._up, self._down)

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        return self._down(ctx, ctx.ops.activate(self._up(ctx, x), self.activation))

    @property
    def packed(self) -> tuple[CompiledLinear, CompiledLinear] | None:
        up, down = self._up.packed, self._down.packed
        return None if up is None or down is None else (up, down)
