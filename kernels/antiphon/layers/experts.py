"""The experts of a layer: many gated blocks of which each token meets a few.

Axes: T tokens, E experts, K experts that a token goes to, N rows in the order of their experts,
D hidden size, W width of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from antiphon.kernels.experts import by_expert
from antiphon.layers.methods import Cut, LinearShape
from antiphon.layers.weights import WeightSource

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from antiphon.kernels.activation import Activation
    from antiphon.layers.block import Site
    from antiphon.layers.context import ForwardContext
    from antiphon.layers.methods import LinearWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class SeparateExperts:
    """A checkpoint that has three linears an expert; `{}` in their names is its number."""

    gate: str = "mlp.experts.{}.gate_proj"
    up: str = "mlp.experts.{}.up_proj"
    down: str = "mlp.experts.{}.down_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedExperts:
    """A checkpoint that has all experts in one tensor, inputs before outputs.

    Attributes:
        gate_up: (E, D, 2 W).
        down: (E, W, D).
        interleaved: Outputs of gate and up take turns; otherwise the gate's come first.
        bias: What the names of their biases, (E, 2 W) and (E, D), end in.
    """

    gate_up: str = "mlp.experts.gate_up_proj"
    down: str = "mlp.experts.down_proj"
    interleaved: bool = False
    bias: str = "_bias"


@dataclass(frozen=True, slots=True, kw_only=True)
class Clamp:
    """The gate of `activation.clamped_swish_mul`."""

    sharpness: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """The experts of a layer; names of tensors follow the layer's.

    Attributes:
        bias: Of all three linears.
        weighs_input: A token's share multiplies what goes into an expert, not what comes out.
        spread: What ranks share out: every expert's `width`, or whole `experts`.
    """

    count: int
    width: int
    names: SeparateExperts | StackedExperts = SeparateExperts()
    activation: Activation | Clamp = "silu"
    bias: bool = False
    weighs_input: bool = False
    spread: Literal["width", "experts"] = "width"


@dataclass(frozen=True, slots=True)
class _Expert:
    gate_up: LinearWeights
    down: LinearWeights


class Experts:
    """The experts that this rank has a part of; each is two linears of the method by itself."""

    def __init__(self, site: Site, spec: ExpertsSpec) -> None:
        build, method, name = site.build, site.method, f"{site.name}.experts"
        self._site, self._spec, self._method = site, spec, method
        if spec.spread == "experts":
            count, self._width = build.share(spec.count, name), spec.width
            self._first, self._start = build.tp.rank * count, 0
        else:
            count, self._width = spec.count, build.share(spec.width, name)
            self._first, self._start = 0, build.tp.rank * self._width
        # What is summed over ranks has its bias once.
        self._down_bias = spec.bias and (spec.spread == "experts" or build.tp.rank == 0)
        wide = LinearShape(site.hidden, 2 * self._width, spec.bias, halves=True)
        back = LinearShape(self._width, site.hidden, self._down_bias)
        self._experts = [
            _Expert(method.create(wide, build), method.create(back, build)) for _ in range(count)
        ]

    @property
    def operations(self) -> frozenset[str]:
        """The gate's, and the sum's."""
        activation = self._spec.activation
        if isinstance(activation, Clamp):
            return frozenset({"activation.clamped_swish_mul", "moe.combine"})
        gate = "activation.silu_mul" if activation == "silu" else "activation.gate"
        return frozenset({gate, "moe.combine"})

    def __call__(self, ctx: ForwardContext, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """What this rank's experts make of each token: x (T, D)  ->  (T, D), to be summed.

        chosen (T, K) int64, shares (T, K) float32
        """
        found = by_expert(chosen, self._first, len(self._experts))
        rows = x.index_select(0, found.pair // chosen.shape[1])  # (N, D)
        if self._spec.weighs_input:
            rows = (rows * shares.flatten()[found.pair, None]).to(x.dtype)
            shares = torch.ones_like(shares)
        made = [
            self._block(ctx, expert, rows[begin:end])
            for expert, begin, end in zip(
                self._experts, found.bounds, found.bounds[1:], strict=False
            )
            if begin < end
        ]
        return ctx.ops.combine(torch.cat(made) if made else rows, found.pair, shares)

    def sources(self) -> Iterator[WeightSource]:
        """Tensors of all experts."""
        names = self._spec.names
        if isinstance(names, SeparateExperts):
            yield from self._separate(names)
        else:
            yield from self._stacked(names)

    def pack(self) -> None:
        """Called once all sources are loaded."""
        for expert in self._experts:
            self._method.pack(expert.gate_up)
            self._method.pack(expert.down)

    def _block(self, ctx: ForwardContext, expert: _Expert, rows: Tensor) -> Tensor:
        gate_up = self._method.apply(expert.gate_up, rows)
        return self._method.apply(expert.down, self._gated(ctx, gate_up))

    def _gated(self, ctx: ForwardContext, gate_up: Tensor) -> Tensor:
        activation = self._spec.activation
        if isinstance(activation, Clamp):
            return ctx.ops.clamped_swish_mul(gate_up, activation.sharpness, activation.limit)
        if activation == "silu":
            return ctx.ops.silu_mul(gate_up)
        return ctx.ops.gate(gate_up, activation)

    def _cut(self, into: int) -> Cut:
        """Of a gate or an up (W, D): the rows of this rank."""
        return Cut(slice(self._start, self._start + self._width), slice(None), into)

    @property
    def _down_cut(self) -> Cut:
        return Cut(slice(None), slice(self._start, self._start + self._width), 0)

    def _separate(self, names: SeparateExperts) -> Iterator[WeightSource]:
        """Of every expert in the checkpoint: those of other ranks are passed over."""
        hidden, width = self._site.hidden, self._spec.width
        for number in range(self._spec.count):
            here = 0 <= number - self._first < len(self._experts)
            expert = self._experts[number - self._first] if here else None
            gate_up, down = (expert.gate_up, expert.down) if expert else (None, None)
            parts = (
                (names.gate, gate_up, self._cut(0), (width, hidden), True),
                (names.up, gate_up, self._cut(self._width), (width, hidden), True),
                (names.down, down, self._down_cut, (hidden, width), self._down_bias),
            )
            for template, weights, cut, shape, biased in parts:
                name = self._site.named(template.format(number))
                yield self._source(f"{name}.weight", weights, cut, shape)
                if self._spec.bias:
                    kept = weights if biased else None
                    yield self._source(f"{name}.bias", kept, cut, shape[:1])

    def _source(
        self, name: str, weights: LinearWeights | None, cut: Cut, shape: tuple[int, ...]
    ) -> WeightSource:
        def load(tensor: Tensor) -> None:
            if weights is not None:
                self._method.load(weights, _field(tensor), tensor, cut)

        return WeightSource(name, shape, load)

    def _stacked(self, names: StackedExperts) -> Iterator[WeightSource]:
        count, hidden, width = self._spec.count, self._site.hidden, self._spec.width
        gate_up, down = self._site.named(names.gate_up), self._site.named(names.down)
        yield WeightSource(gate_up, (count, hidden, 2 * width), self._load_gate_up)
        yield WeightSource(down, (count, width, hidden), self._load_down)
        if self._spec.bias:
            yield WeightSource(gate_up + names.bias, (count, 2 * width), self._load_gate_up)
            yield WeightSource(down + names.bias, (count, hidden), self._load_down)

    def _load_gate_up(self, tensor: Tensor) -> None:
        """Of all experts: weights (E, D, 2 W) or biases (E, 2 W)."""
        names, width = self._spec.names, self._spec.width
        assert isinstance(names, StackedExperts), "tensors of another layout"
        for number, expert in enumerate(self._experts, self._first):
            both = tensor[number].t()  # (2 W, D) or (2 W,)
            halves = (both[:width], both[width:])
            if names.interleaved:
                halves = (both[::2], both[1::2])
            for index, half in enumerate(halves):
                cut = self._cut(index * self._width)
                self._method.load(expert.gate_up, _field(half), half.contiguous(), cut)

    def _load_down(self, tensor: Tensor) -> None:
        """Of all experts: weights (E, W, D) or biases (E, D)."""
        for number, expert in enumerate(self._experts, self._first):
            one = tensor[number].t().contiguous()  # (D, W) or (D,)
            if _field(one) == "weight" or self._down_bias:
                self._method.load(expert.down, _field(one), one, self._down_cut)


def _field(tensor: Tensor) -> str:
    return "weight" if tensor.dim() > 1 else "bias"
