"""The experts of a layer: gated blocks, of which each token uses a few.

Axes: T tokens, E experts, K experts of a token, N rows sorted by expert, D hidden size, W width of
an expert.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch

from antiphon.kernels.routing import sort_by_expert
from antiphon.layers.linear import LinearPart, weight_sources
from antiphon.layers.methods import LinearShape, RankSlice
from antiphon.layers.quantization.storage import dequantized
from antiphon.layers.weights import Module, WeightSource, void

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from antiphon.kernels.activation import ActivationKind
    from antiphon.layers.context import ForwardContext
    from antiphon.layers.methods import LinearWeights
    from antiphon.layers.quantization.storage import StorageLayout, WeightField
    from antiphon.layers.sublayer import LayerBuildContext

    Take = Callable[["_Expert", Tensor], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SeparateExperts:
    gate: str = "mlp.experts.{}.gate_proj"
    up: str = "mlp.experts.{}.up_proj"
    down: str = "mlp.experts.{}.down_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedExperts:
    """A checkpoint with all experts in one tensor, inputs before outputs."""

    gate_up: str = "mlp.experts.gate_up_proj"  # (E, D, 2 W)
    down: str = "mlp.experts.down_proj"  # (E, W, D)
    # Whether outputs of gate and up alternate; else the gate's come first.
    interleaved: bool = False
    bias: str = "_bias"  # suffix of the names of their biases, (E, 2 W) and (E, D)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampedSwish:
    alpha: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """The experts of a layer; names of tensors are relative to the layer."""

    count: int
    width: int
    names: SeparateExperts | StackedExperts = SeparateExperts()
    activation: ActivationKind | ClampedSwish = "silu"
    bias: bool = False  # of all three linears
    # The router weight multiplies the input of an expert, not its output.
    apply_router_weight_on_input: bool = False
    # What is sharded over ranks: every expert's `width`, or whole `experts`.
    sharded_axis: Literal["width", "experts"] = "width"


@dataclass(frozen=True, slots=True)
class _Expert:
    gate_up: LinearWeights
    down: LinearWeights


class Experts(Module):
    """The experts, or parts of experts, of this rank; each is two linears of its own."""

    def __init__(self, site: LayerBuildContext, spec: ExpertsSpec) -> None:
        build, name = site.build, f"{site.name}.experts"
        self._site, self._spec = site, spec
        if spec.sharded_axis == "experts":
            count, self._width = build.share(spec.count, name), spec.width
            self._first, self._start = build.tp.rank * count, 0
        else:
            count, self._width = spec.count, build.share(spec.width, name)
            self._first, self._start = 0, build.tp.rank * self._width
        # The outputs are summed over ranks, so only one rank adds the bias.
        self._down_bias = spec.bias and (spec.sharded_axis == "experts" or build.tp.rank == 0)
        self._experts = [self._expert(self._first + index) for index in range(count)]
        gate = "activation.silu_mul" if spec.activation == "silu" else "activation.gate"
        if isinstance(spec.activation, ClampedSwish):
            gate = "activation.clamped_swish_mul"
        self.kernels = frozenset({gate, "moe.combine"})

    def __call__(self, ctx: ForwardContext, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """This rank's part of the experts' output: x (T, D)  ->  (T, D), to be summed over ranks.

        chosen (T, K) int64, shares (T, K) float32
        """
        found = sort_by_expert(chosen, self._first, len(self._experts))
        rows = x.index_select(0, found.pair // chosen.shape[1])  # (N, D)
        if self._spec.apply_router_weight_on_input:
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
        names = self._spec.names
        if isinstance(names, SeparateExperts):
            yield from self._separate(names)
        else:
            yield from self._stacked(names)

    def _expert(self, number: int) -> _Expert:
        build, method, names = self._site.build, self._site.method, self._spec.names
        if isinstance(names, SeparateExperts):
            wide, back = (
                (names.gate.format(number), names.up.format(number)),
                (names.down.format(number),),
            )
        else:
            wide, back = (names.gate_up,), (names.down,)
        gate_up = build.method(map(self._site.tensor_name, wide), method)
        down = build.method(map(self._site.tensor_name, back), method)
        hidden, width, bias = self._site.hidden, self._width, self._spec.bias
        wide_shape = LinearShape(hidden, 2 * width, bias, halves=True)
        down_shape = LinearShape(width, hidden, self._down_bias)
        return _Expert(
            gate_up.create(wide_shape, build.dtype, build.device),
            down.create(down_shape, build.dtype, build.device),
        )

    def _block(self, ctx: ForwardContext, expert: _Expert, rows: Tensor) -> Tensor:
        return expert.down.apply(self._gated(ctx, expert.gate_up.apply(rows)))

    def _gated(self, ctx: ForwardContext, gate_up: Tensor) -> Tensor:
        activation = self._spec.activation
        if isinstance(activation, ClampedSwish):
            return ctx.ops.clamped_swish_mul(gate_up, activation.alpha, activation.limit)
        if activation == "silu":
            return ctx.ops.silu_mul(gate_up)
        return ctx.ops.gate(gate_up, activation)

    def _cut(self, into: int) -> RankSlice:
        return RankSlice(slice(self._start, self._start + self._width), slice(None), into)

    @property
    def _down_cut(self) -> RankSlice:
        return RankSlice(slice(None), slice(self._start, self._start + self._width), 0)

    def _separate(self, names: SeparateExperts) -> Iterator[WeightSource]:
        """For every expert in the checkpoint; tensors of other ranks' experts are not loaded."""
        hidden, width = self._site.hidden, self._spec.width
        for number in range(self._spec.count):
            index = number - self._first
            expert = self._experts[index] if 0 <= index < len(self._experts) else None
            gate_up, down = (expert.gate_up, expert.down) if expert else (None, None)
            parts = (
                (names.gate, (width, hidden), self._cut(0), gate_up, gate_up),
                (names.up, (width, hidden), self._cut(self._width), gate_up, gate_up),
                (names.down, (hidden, width), self._down_cut, down, self._with_bias(down)),
            )
            for template, shape, cut, kept, biased in parts:
                part = LinearPart(
                    self._site.tensor_name(template.format(number)), shape[0], shards=1
                )
                yield from self._weight(part, shape[1], cut, kept)
                if self._spec.bias:
                    yield WeightSource(f"{part.name}.bias", shape[:1], _into(biased, cut))

    def _weight(
        self, part: LinearPart, inputs: int, cut: RankSlice, kept: LinearWeights | None
    ) -> Iterator[WeightSource]:
        """The sources of a weight in any storage layout; None: not loaded on this rank."""
        into = kept or self._experts[0].down
        for source in weight_sources(part, inputs, cut, self._site.build, into):
            yield source if kept is not None else replace(source, load=void)

    def _with_bias(self, down: LinearWeights | None) -> LinearWeights | None:
        return down if self._down_bias else None

    def _stacked(self, names: StackedExperts) -> Iterator[WeightSource]:
        count, hidden, width = self._spec.count, self._site.hidden, self._spec.width
        gate_up, down = self._site.tensor_name(names.gate_up), self._site.tensor_name(names.down)
        for name, outputs, inputs, take in (
            (gate_up, 2 * width, hidden, self._take_gate_up),
            (down, hidden, width, self._take_down),
        ):
            storage = self._site.build.storage(name)
            if storage is not None:
                yield from self._stored(name, storage, (outputs, inputs), take)
                continue
            yield WeightSource(name, (count, inputs, outputs), self._each(take))
        if self._spec.bias:
            wide = self._each(self._take_gate_up)
            yield WeightSource(gate_up + names.bias, (count, 2 * width), wide)
            yield WeightSource(down + names.bias, (count, hidden), self._each(self._take_down))

    def _stored(
        self, name: str, storage: StorageLayout, shape: tuple[int, int], take: Take
    ) -> Iterator[WeightSource]:
        """Quantized tensors with the weights of all experts, outputs before inputs."""
        # The largest is loaded last; the others are kept until then.
        fields = storage.fields(*shape)
        held: dict[str, Tensor] = {}

        def load(field: WeightField, tensor: Tensor) -> None:
            held[field.suffix] = tensor.clone() if field is not fields[-1] else tensor
            if field is fields[-1]:
                for number, expert in enumerate(self._experts, self._first):
                    own = {suffix: tensor[number] for suffix, tensor in held.items()}
                    take(expert, dequantized(storage.dequantize(own, *shape)))
                held.clear()

        for field in fields:
            yield WeightSource(
                name + field.suffix,
                (self._spec.count, *field.shape(*shape)),
                partial(load, field),
                field.dtypes,
            )

    def _each(self, take: Take) -> Callable[[Tensor], None]:
        def load(tensor: Tensor) -> None:
            for number, expert in enumerate(self._experts, self._first):
                take(expert, tensor[number].t())

        return load

    def _take_gate_up(self, expert: _Expert, both: Tensor) -> None:
        """A weight (2 W, D) or a bias (2 W,)."""
        names, width = self._spec.names, self._spec.width
        assert isinstance(names, StackedExperts), "tensors of another layout"
        halves = (both[:width], both[width:])
        if names.interleaved:
            halves = (both[::2], both[1::2])
        for index, half in enumerate(halves):
            field = "weight" if half.dim() > 1 else "bias"
            expert.gate_up.load(field, half.contiguous(), self._cut(index * self._width))

    def _take_down(self, expert: _Expert, one: Tensor) -> None:
        """A weight (D, W) or a bias (D,)."""
        if one.dim() > 1:
            expert.down.load("weight", one.contiguous(), self._down_cut)
        elif self._down_bias:
            expert.down.load("bias", one, self._down_cut)


def _into(kept: LinearWeights | None, cut: RankSlice) -> Callable[[Tensor], None]:
    return void if kept is None else lambda tensor: kept.load("bias", tensor, cut)
