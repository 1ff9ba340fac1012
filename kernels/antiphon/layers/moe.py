"""Mixture of experts: a router, the routed experts, and a shared expert."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from antiphon.kernels.activation import ActivationKind, sigmoid
from antiphon.kernels.cpu.experts import CompiledExperts, PackedExperts
from antiphon.kernels.experts import ExpertSlice, ExpertWeights, Matrix, PlainMatrix, matrix_of
from antiphon.kernels.routing import RoutingSpec, sort_by_expert
from antiphon.layers.linear import LinearPart, kernels_of, multiply, weight_sources
from antiphon.layers.methods import (
    WHOLE_SLICE,
    LinearShape,
    LinearWeights,
    OpCodes,
    OpWeights,
    PlainWeights,
    RankSlice,
)
from antiphon.layers.mlp import GatedMlp, GatedMlpSpec
from antiphon.layers.quantization.four_bit import Nvfp4Storage
from antiphon.layers.quantization.storage import (
    FLOATS,
    LoadedWeight,
    StorageLayout,
    WeightField,
    slice_weight,
)
from antiphon.layers.sublayer import LayerBuildContext, Sublayer
from antiphon.layers.weights import Module, WeightSource, replicated_source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from antiphon.kernels.cpu.linear import CompiledLinear
    from antiphon.layers.context import ForwardContext
    from antiphon.layers.norm import NormSpec
    from antiphon.layers.weights import BuildContext

    Take = Callable[["_Expert", LoadedWeight], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """A router, its experts and an optional shared expert.

    Names of tensors are relative to the layer.
    """

    routing: RoutingSpec
    experts: ExpertsSpec
    router: str = "mlp.gate"  # name of the linear that scores the experts
    router_bias: bool = False  # whether it has a bias
    # Name of the bias that affects only the selection; None without one.
    correction: str | None = None
    router_norm: NormSpec | None = None  # of what the router reads, without weights
    # Name of factors of what it reads, one for each element, and a factor of all; None without.
    router_scale: str | None = None
    router_factor: float = 1.0
    # Name of factors of the weights of the selected experts, one for each expert; None without.
    expert_scale: str | None = None
    experts_norm: NormSpec | None = None  # of what the experts read; None: what the router reads
    experts_norm_name: str = ""
    # The shared expert, which processes every token; None without one.
    shared: GatedMlpSpec | None = None
    # Name of the linear whose sigmoid scales the shared expert's output; None: no scaling.
    shared_gate: str | None = None


class Router(Module):
    """Scores the experts, in float32: rounding could send a token elsewhere on a near tie."""

    kernels = frozenset({"moe.route"})

    def __init__(self, site: LayerBuildContext, spec: MoeSpec) -> None:
        self._spec, self._name = spec, site.tensor_name(spec.router)
        self._size = (spec.experts.count, site.hidden)
        device = site.build.device
        shape = LinearShape(site.hidden, spec.experts.count, spec.router_bias)
        self._weights = site.method.exact().create(shape, torch.float32, device)
        self.kernels = Router.kernels | kernels_of(self._weights)
        self._norm = None
        if spec.router_norm is not None:
            assert not spec.router_norm.affine, "its factors have a name of their own"
            self._norm = site.norm(spec.router_norm, "", site.hidden)
        self.children = (self._norm,)
        # In float32, by name in the checkpoint.
        self._vectors: dict[str, Tensor] = {}
        self._correction = self._vector(site, spec.correction, spec.experts.count)
        self._scale = self._vector(site, spec.router_scale, site.hidden)
        self._expert_scale = self._vector(site, spec.expert_scale, spec.experts.count)

    def __call__(self, ctx: ForwardContext, x: Tensor) -> tuple[Tensor, Tensor]:
        """Route: x (T, D)  ->  experts (T, K) int64 and their weights (T, K) float32."""
        read = (x if self._norm is None else self._norm(ctx, x)).float()
        if self._scale is not None:
            read = read * self._scale * self._spec.router_factor
        logits = multiply(ctx, self._weights, read)
        experts, shares = ctx.ops.route(logits, self._correction, self._spec.routing)
        if self._expert_scale is not None:
            shares = shares * self._expert_scale[experts]
        return experts, shares

    @property
    def plain(self) -> bool:
        """Whether it reads what the experts read, and weighs them by its scores alone."""
        return self._norm is None and self._scale is None and self._expert_scale is None

    @property
    def packed(self) -> CompiledLinear | None:
        return self._weights.packed

    @property
    def correction(self) -> Tensor | None:
        return self._correction

    def sources(self) -> Iterator[WeightSource]:
        yield self._source("weight", self._size)
        if self._spec.router_bias:
            yield self._source("bias", self._size[:1])
        for name, kept in self._vectors.items():
            yield from replicated_source(name, kept)

    def _vector(self, site: LayerBuildContext, name: str | None, size: int) -> Tensor | None:
        if name is None:
            return None
        kept = torch.empty(size, dtype=torch.float32, device=site.build.device)
        return self._vectors.setdefault(site.tensor_name(name), kept)

    def _source(self, field: str, size: tuple[int, ...]) -> WeightSource:
        return WeightSource(
            f"{self._name}.{field}",
            size,
            lambda tensor: self._weights.load(field, tensor, WHOLE_SLICE),
        )


class MixtureOfExperts(Sublayer):
    """Experts and the shared expert: one call of the CPU kernels where all linears are packed."""

    def __init__(self, site: LayerBuildContext, spec: MoeSpec) -> None:
        self._spec = spec
        self._router = Router(site, spec)
        self._experts = Experts(site, spec.experts)
        self._norm = None
        if spec.experts_norm is not None:
            self._norm = site.norm(spec.experts_norm, spec.experts_norm_name, site.hidden)
        self._shared = None if spec.shared is None else GatedMlp(site, spec.shared)
        self._gate = None
        if spec.shared_gate is not None:
            self._gate = site.replicated(
                spec.shared_gate, 1, bias=False, method=site.method.exact()
            )
        self.children = (self._router, self._norm, self._experts, self._shared, self._gate)
        # Ranks sum what their parts of the experts made; the shared expert does that by itself.
        self._whole = site.build.tp.ranks == 1 and (
            self._shared is None or (self._shared.unscaled and self._shared.activation == "silu")
        )
        self._compiled = self._compile()

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        if self.packed is not None:
            return self.packed.forward(x)
        if self._compiled is not None:
            made = self._compiled.forward(ctx.experts.dispatch(x))
        else:
            tokens = ctx.experts.dispatch(x)
            read = tokens if self._norm is None else self._norm(ctx, tokens)
            made = self._experts(ctx, read, *self._router(ctx, tokens))
        routed = ctx.experts.combine(made)
        if self._shared is None:
            return routed
        shared = self._shared(ctx, x)
        if self._gate is not None:
            shared = shared * sigmoid(self._gate(ctx, x))
        return routed + shared

    @property
    def packed(self) -> CompiledExperts | None:
        """All of it as one call, if it can be."""
        return self._compiled if self._whole else None

    @property
    def operations(self) -> frozenset[str]:
        if self._compiled is None:
            return super().operations
        return frozenset() if self._whole or self._shared is None else self._shared.operations

    def _compile(self) -> CompiledExperts | None:
        """The experts as one call, with the shared one if that is `whole`."""
        router, experts = self._router.packed, self._experts.packed
        if router is None or experts is None or not self._router.plain or self._norm is not None:
            return None
        shared = gate = None
        if self._whole and self._shared is not None:
            shared = self._shared.packed
            gate = None if self._gate is None else self._gate.packed
            if shared is None or (gate is None and self._gate is not None):
                return None
        spec = self._spec.experts
        gate_up, down = experts
        return PackedExperts(
            routing=self._spec.routing,
            router=router,
            correction=self._router.correction,
            gate_up=gate_up,
            down=down,
            first=self._experts.share.numbers.start,
            activation=self._experts.activation,
            apply_router_weight_on_input=spec.apply_router_weight_on_input,
            shared=shared,
            shared_gate=gate,
        ).compile()


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


@dataclass(frozen=True, slots=True)
class ExpertsShare:
    """A rank's share of the experts of a layer: some of them, and a part of the width of each."""

    numbers: range
    width: slice

    @classmethod
    def of(cls, spec: ExpertsSpec, build: BuildContext, layer: str) -> ExpertsShare:
        """The share of the rank that builds the layer.

        Raises:
            ValueError: The experts cannot be shared out evenly; names the layer.
        """
        tp, parts = build.tp, build.ep_ranks
        each = tp.ranks // parts
        if spec.count % parts:
            raise ValueError(
                f"{layer}.experts: {spec.count} are not divisible by {parts} expert-parallel ranks"
            )
        if spec.width % each:
            raise ValueError(f"{layer}.experts: {spec.width} is not divisible by {each} ranks")
        part, piece = divmod(tp.rank, each)
        count, width = spec.count // parts, spec.width // each
        numbers = range(part * count, (part + 1) * count)
        return cls(numbers, slice(piece * width, (piece + 1) * width))


@dataclass(frozen=True, slots=True)
class _Expert:
    gate_up: LinearWeights | OpWeights
    down: LinearWeights | OpWeights


class Experts(Module):
    """This rank's share of all experts; each is two linears of its own.

    A GPU multiplies by all of them at once, and so does what computes with weights in fp8. Weights
    stay as they are stored where those of all experts can.
    """

    def __init__(self, site: LayerBuildContext, spec: ExpertsSpec) -> None:
        self._site, self._spec = site, spec
        self.share = ExpertsShare.of(spec, site.build, site.name)
        own, numbers = self.share.width, self.share.numbers
        self._slice = None
        if len(numbers) < spec.count:
            self._slice = ExpertSlice(numbers.start, spec.count)
        self._width = own.stop - own.start
        # The outputs of an expert's parts are summed, so only one rank adds the bias.
        self._down_bias = spec.bias and own.start == 0
        wide_shape = LinearShape(site.hidden, 2 * self._width, spec.bias, halves=True)
        self._shapes = wide_shape, LinearShape(self._width, site.hidden, self._down_bias)
        self._codes = self._op_codes()
        self._stack = self._stacked_weights()
        self._experts = [self._expert(number) for number in numbers]
        gate = "activation.silu_mul" if spec.activation == "silu" else "activation.gate"
        if isinstance(spec.activation, ClampedSwish):
            gate = "activation.clamped_swish_mul"
        self.kernels = frozenset({gate, "moe.combine"} if self._stack is None else {"moe.experts"})

    def __call__(self, ctx: ForwardContext, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """This rank's part of the experts' output: x (T, D)  ->  (T, D), to be summed over ranks.

        chosen (T, K) int64, shares (T, K) float32
        """
        weighted_inputs = self._spec.apply_router_weight_on_input
        if self._stack is not None:
            return ctx.ops.experts(
                x,
                chosen,
                shares,
                self._stack,
                self.activation,
                own=self._slice,
                weighted_inputs=weighted_inputs,
            )
        pair, bounds = sort_by_expert(chosen, self.share.numbers)
        rows = x.index_select(0, pair // chosen.shape[1])  # (N, D)
        if weighted_inputs:
            rows = (rows * shares.flatten()[pair, None]).to(x.dtype)
            shares = torch.ones_like(shares)
        made = [
            multiply(
                ctx, expert.down, self._gated(ctx, multiply(ctx, expert.gate_up, rows[begin:end]))
            )
            for expert, begin, end in zip(self._experts, bounds, bounds[1:], strict=False)
            if begin < end
        ]
        return ctx.ops.combine(torch.cat(made) if made else rows, pair, shares)

    @property
    def packed(self) -> tuple[list[CompiledLinear], list[CompiledLinear]] | None:
        """Gate and up of each expert here, and down; None unless all are packed."""
        gate_up = [expert.gate_up.packed for expert in self._experts]
        down = [expert.down.packed for expert in self._experts]
        if None in gate_up or None in down:
            return None
        return [each for each in gate_up if each], [each for each in down if each]

    def sources(self) -> Iterator[WeightSource]:
        names = self._spec.names
        if isinstance(names, SeparateExperts):
            yield from self._separate(names)
        else:
            yield from self._stacked(names)

    @property
    def activation(self) -> ActivationKind | tuple[float, float]:
        activation = self._spec.activation
        if isinstance(activation, ClampedSwish):
            return activation.alpha, activation.limit
        return activation

    def _stacked_weights(self) -> ExpertWeights | None:
        """The weights of all experts here in one tensor; None: each has its own."""
        build, codes = self._site.build, self._codes
        if codes is None and build.device_kind == "cpu":
            return None
        return ExpertWeights(*map(self._matrix, self._shapes, codes or (None, None)))

    def _matrix(self, shape: LinearShape, codes: OpCodes | None) -> Matrix:
        """Memory of the weights of a linear of all experts here."""
        build, count = self._site.build, len(self.share.numbers)
        if codes is not None:
            return codes.empty(shape, build.dtype, build.device, count)
        bias = build.empty(count, shape.outputs) if shape.bias else None
        return PlainMatrix(build.empty(count, shape.outputs, shape.inputs), bias)

    def _op_codes(self) -> tuple[OpCodes, OpCodes] | None:
        """How both linears stay as they are stored; None: not those of all experts do alike."""
        build, method = self._site.build, self._site.method
        wide_shape, down_shape = self._shapes
        found: set[tuple[OpCodes | None, OpCodes | None]] = set()
        for number in self.share.numbers:
            wide_names, down_names = self._names(number)
            found.add(
                (
                    build.op_codes(wide_names, wide_shape, method, self._site.hidden),
                    build.op_codes(down_names, down_shape, method, self._spec.width),
                )
            )
        wide, down = found.pop()
        return None if found or wide is None or down is None else (wide, down)

    def _names(self, number: int) -> tuple[list[str], list[str]]:
        """Of an expert's linears: those of gate and up, and that of down."""

        def named(*templates: str) -> list[str]:
            return [self._site.tensor_name(template.format(number)) for template in templates]

        names = self._spec.names
        if isinstance(names, SeparateExperts):
            return named(names.gate, names.up), named(names.down)
        return named(names.gate_up), named(names.down)

    def _expert(self, number: int) -> _Expert:
        stack = self._stack
        if stack is None:
            build, method = self._site.build, self._site.method
            (wide, down), (wide_shape, down_shape) = self._names(number), self._shapes
            return _Expert(
                build.create(wide, wide_shape, method, self._site.hidden),
                build.create(down, down_shape, method, self._spec.width),
            )
        place = number - self.share.numbers.start
        matrices = (matrix_of(matrix, place) for matrix in stack)
        return _Expert(*map(self._linear, matrices, self._codes or (None, None)))

    def _linear(self, matrix: Matrix, codes: OpCodes | None) -> PlainWeights | OpWeights:
        if isinstance(matrix, PlainMatrix):
            return PlainWeights(*matrix)
        assert codes is not None, "how it is kept"
        return codes.weights(matrix)

    def _gated(self, ctx: ForwardContext, gate_up: Tensor) -> Tensor:
        activation = self.activation
        if isinstance(activation, tuple):
            return ctx.ops.clamped_swish_mul(gate_up, *activation)
        if activation == "silu":
            return ctx.ops.silu_mul(gate_up)
        return ctx.ops.gate(gate_up, activation)

    def _cut(self, into: int) -> RankSlice:
        return RankSlice(self.share.width, slice(None), into)

    @property
    def _down_cut(self) -> RankSlice:
        return RankSlice(slice(None), self.share.width, 0)

    def _separate(self, names: SeparateExperts) -> Iterator[WeightSource]:
        hidden, width = self._site.hidden, self._spec.width
        numbers = self.share.numbers
        for number in range(self._spec.count):
            here = number in numbers
            expert = self._experts[number - numbers.start if here else 0]
            parts = (
                (names.gate, (width, hidden), self._cut(0), expert.gate_up, True),
                (names.up, (width, hidden), self._cut(self._width), expert.gate_up, True),
                (names.down, (hidden, width), self._down_cut, expert.down, self._down_bias),
            )
            for template, shape, cut, weights, biased in parts:
                name = self._site.tensor_name(template.format(number))
                part = LinearPart(name, shape[0], shards=1)
                sources = [*weight_sources(part, shape[1], cut, self._site.build, weights)]
                if self._spec.bias:
                    load = partial(weights.load, "bias", cut=cut) if biased else None
                    sources.append(WeightSource(f"{name}.bias", shape[:1], load))
                yield from sources if here else [source.elsewhere() for source in sources]

    def _stacked(self, names: StackedExperts) -> Iterator[WeightSource]:
        count, hidden, width = self._spec.count, self._site.hidden, self._spec.width
        gate_up, down = self._site.tensor_name(names.gate_up), self._site.tensor_name(names.down)
        here = slice(self.share.numbers.start, self.share.numbers.stop)
        for name, outputs, inputs, take in (
            (gate_up, 2 * width, hidden, self._take_gate_up),
            (down, hidden, width, self._take_down),
        ):
            storage = self._site.build.storage(name)
            if isinstance(storage, Nvfp4Storage):
                # Published ones have inputs or outputs first, and a scale for all experts or each.
                message = f"{name}: stacked experts are not read in NVFP4, only separate ones"
                raise ValueError(message)  # noqa: TRY004  # of a checkpoint
            if storage is None or _is_plain(storage, outputs, inputs):
                load = self._each(take, storage)
                yield WeightSource(name, (count, inputs, outputs), load, rows=here)
            else:
                yield from self._stored(name, storage, (outputs, inputs), take)
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
                for number, expert in zip(self.share.numbers, self._experts, strict=True):
                    own = {suffix: tensor[number] for suffix, tensor in held.items()}
                    take(expert, storage.dequantize(own, *shape))
                held.clear()

        for field in fields:
            yield WeightSource(
                name + field.suffix,
                (self._spec.count, *field.shape(*shape)),
                partial(load, field),
                field.dtypes,
                rows=slice(self.share.numbers.start, self.share.numbers.stop),
            )

    def _each(self, take: Take, storage: StorageLayout | None = None) -> Callable[[Tensor], None]:
        """Takes the tensor of all experts; a storage quantizes each weight of it."""

        def load(tensor: Tensor) -> None:
            for number, expert in zip(self.share.numbers, self._experts, strict=True):
                weight = tensor[number].t()
                if storage is None:
                    take(expert, weight)
                else:
                    take(expert, storage.dequantize({".weight": weight}, *weight.shape))

        return load

    def _take_gate_up(self, expert: _Expert, both: LoadedWeight) -> None:
        """A weight (2 W, D) or a bias (2 W,)."""
        names, width = self._spec.names, self._spec.width
        assert isinstance(names, StackedExperts), "tensors of another layout"
        rows = (slice(0, width), slice(width, None))
        if names.interleaved:
            rows = (slice(0, None, 2), slice(1, None, 2))
        for index, half in enumerate(rows):
            into = self._cut(index * self._width)
            if isinstance(both, torch.Tensor):
                field = "weight" if both.dim() > 1 else "bias"
                expert.gate_up.load(field, both[half].contiguous(), into)
            else:
                expert.gate_up.load("weight", slice_weight(both, half, slice(None)), into)

    def _take_down(self, expert: _Expert, one: LoadedWeight) -> None:
        """A weight (D, W) or a bias (D,)."""
        if not isinstance(one, torch.Tensor):
            expert.down.load("weight", one, self._down_cut)
        elif one.dim() > 1:
            expert.down.load("weight", one.contiguous(), self._down_cut)
        elif self._down_bias:
            expert.down.load("bias", one, self._down_cut)


def _is_plain(storage: StorageLayout, outputs: int, inputs: int) -> bool:
    """Whether weights are in plain numbers, which are quantized as they are loaded."""
    fields = storage.fields(outputs, inputs)
    return [(field.suffix, field.dtypes) for field in fields] == [(".weight", FLOATS)]
