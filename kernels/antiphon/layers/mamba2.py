"""Mamba 2: a short convolution, then a recurrence with a decaying state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 (its name in every torch program)

from antiphon.kernels.states import StateSpec
from antiphon.layers.linear import CheckpointLayout, LinearPart
from antiphon.layers.recurrent import HeadVector, ShortConv
from antiphon.layers.sublayer import LayerBuildContext, Sublayer
from antiphon.layers.weights import WeightSource, void

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from antiphon.layers.context import ForwardContext

Scales = tuple[float, float, float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Names:
    """Names of a layer's tensors in the checkpoint, relative to the layer.

    `inputs` has gate, x, B, C and step of each token, in this order; `conv` x, B and C.
    """

    inputs: str = "mamba.in_proj"
    conv: str = "mamba.conv1d"
    decay: str = "mamba.A_log"
    skip: str = "mamba.D"
    step_bias: str = "mamba.dt_bias"
    norm: str = "mamba.norm"
    out: str = "mamba.out_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Spec:
    """Mamba 2, as by Dao and Gu (arXiv:2405.21060)."""

    heads: int  # each with its own decay and `head_size` channels
    head_size: int
    groups: int  # of heads that share B and C
    state_size: int  # state elements of a channel
    taps: int  # of the convolution
    conv_bias: bool = True
    input_bias: bool = False  # of the projection to gate, x, B, C and step
    out_bias: bool = False
    norm_eps: float | None = None  # of the norm after the recurrence; None: no norm, only the gate
    gate_first: bool = True  # whether the gate multiplies the input of the norm, not its result
    step_limits: tuple[float, float] = (0.0, float("inf"))  # step sizes are clamped to these
    # Multipliers of the projected gate, x, B, C and step.
    scales: Scales = (1.0, 1.0, 1.0, 1.0, 1.0)
    names: Mamba2Names = field(default_factory=Mamba2Names)

    @property
    def width(self) -> int:
        return self.heads * self.head_size

    @property
    def cache(self) -> StateSpec:
        return StateSpec(
            channels=self.width,
            shared=2 * self.groups * self.state_size,
            groups=self.groups,
            taps=self.taps,
            heads=self.heads,
            rows=self.state_size,
            columns=self.head_size,
        )


class Mamba2(Sublayer):
    """One layer. Axes: T tokens, H heads, P channels of a head, G groups, N state size.

    Heads are sharded over ranks; B and C of a group are on each rank with heads of the group.
    """

    def __init__(self, site: LayerBuildContext, spec: Mamba2Spec) -> None:
        build, names, ranks = site.build, spec.names, site.build.tp.ranks
        self._layer = site.layer
        self._spec = spec
        self._heads = build.share(spec.heads, f"{site.name}.mamba")
        self._groups = spec.groups // min(ranks, spec.groups)
        if spec.norm_eps is not None:
            build.share(spec.groups, f"{site.name}.mamba: groups that are normalised")
        parts = _parts(site, spec)
        self._inputs = site.column("mamba.inputs", parts, bias=spec.input_bias)
        self._conv = ShortConv(site, names.conv, spec.taps, parts[1:4], bias=spec.conv_bias)
        self._decay = HeadVector(site, names.decay, spec.heads)
        self._skip = HeadVector(site, names.skip, spec.heads)
        self._step_bias = HeadVector(site, names.step_bias, spec.heads)
        self._norm = None if spec.norm_eps is None else build.empty(spec.width // ranks)
        self._norm_name = site.tensor_name(names.norm)
        self._first = build.tp.rank * (spec.width // ranks)
        self._out = site.row(names.out, spec.width, bias=spec.out_bias)
        self._scales = _scales(parts, spec.scales, build.dtype, build.device)
        vectors = (self._decay, self._skip, self._step_bias)
        self.children = (self._inputs, self._conv, *vectors, self._out)
        self.kernels = frozenset({"recurrent.conv", "recurrent.ssd"})
        if self._norm is not None:
            self.kernels |= {"norm.gated_rmsnorm"}

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        assert ctx.states_of is not None, "a pass without states"
        states, rows = ctx.states_of(self._layer)
        projected = self._inputs(ctx, x)
        if self._scales is not None:
            projected = projected * self._scales
        width, seen = self._heads * self._spec.head_size, self._conv.weight.shape[0]
        gate, step = projected[:, :width], projected[:, width + seen :]
        mixed = ctx.ops.causal_conv(
            projected[:, width : width + seen],
            self._conv.weight,
            self._conv.bias,
            states.conv_states,
            rows,
        )
        y = ctx.ops.ssd(*self._recurrence(mixed, step), states.recurrent_states, rows).flatten(1)
        return self._out(ctx, self._leave(ctx, y, gate))

    def sources(self) -> Iterator[WeightSource]:
        yield from super().sources()
        if (norm := self._norm) is not None:
            own = slice(self._first, self._first + len(norm))
            yield WeightSource(
                f"{self._norm_name}.weight",
                (self._spec.width,),
                lambda tensor: void(norm.copy_(tensor[own])),
            )

    def _recurrence(
        self, mixed: Tensor, step: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        tokens, width = len(mixed), self._heads * self._spec.head_size
        shared = self._groups * self._spec.state_size
        x = mixed[:, :width].view(tokens, self._heads, -1)
        b = mixed[:, width : width + shared].view(tokens, self._groups, -1)
        c = mixed[:, width + shared :].view(tokens, self._groups, -1)
        dt = F.softplus(step.float() + self._step_bias.value).clamp(*self._spec.step_limits)
        return x, dt, -torch.exp(self._decay.value), b, c, self._skip.value

    def _leave(self, ctx: ForwardContext, y: Tensor, gate: Tensor) -> Tensor:
        """Gate and normalise: y (T, H * P) float32  ->  the same shape in the model's dtype."""
        if self._norm is None:
            return (y * F.silu(gate.float())).to(gate.dtype)
        assert self._spec.norm_eps is not None, "a norm has it"
        return ctx.ops.gated_rmsnorm(
            y, gate, self._norm, self._spec.norm_eps, self._groups, self._spec.gate_first
        )


def _parts(site: LayerBuildContext, spec: Mamba2Spec) -> tuple[LinearPart, ...]:
    ranks, name = site.build.tp.ranks, site.tensor_name(spec.names.inputs)
    shared = spec.groups * spec.state_size
    sizes = (spec.width, spec.width, shared, shared, spec.heads)
    shards = (ranks, ranks, min(ranks, spec.groups), min(ranks, spec.groups), ranks)
    return tuple(
        LinearPart(name, size, shard, CheckpointLayout(run=sum(sizes), first=sum(sizes[:place])))
        for place, (size, shard) in enumerate(zip(sizes, shards, strict=True))
    )


def _scales(
    parts: tuple[LinearPart, ...], scales: Scales, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    if all(scale == 1.0 for scale in scales):
        return None
    runs = [torch.full((part.piece(),), scale) for part, scale in zip(parts, scales, strict=True)]
    return torch.cat(runs).to(dtype=dtype, device=device)
