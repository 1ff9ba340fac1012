"""Mixture of experts: a router, the routed experts, and a shared expert."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from antiphon.kernels.activation import sigmoid
from antiphon.layers.experts import Experts, ExpertsSpec
from antiphon.layers.linear import ReplicatedLinear
from antiphon.layers.methods import LinearShape, RankSlice
from antiphon.layers.mlp import GatedMlp, GatedMlpSpec
from antiphon.layers.weights import WeightSource, void

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from antiphon.kernels.routing import RoutingSpec
    from antiphon.layers.context import ForwardContext
    from antiphon.layers.sublayer import LayerBuildContext


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """A router, its experts and an optional shared expert.

    Names of tensors are relative to the layer.

    Attributes:
        router: Name of the linear that scores the experts.
        router_bias: Whether it has a bias.
        correction: Name of the bias that affects only the selection; None without one.
        shared: The shared expert, which processes every token; None without one.
        shared_gate: Name of the linear whose sigmoid scales the shared expert's output; None: no
            scaling.
    """

    routing: RoutingSpec
    experts: ExpertsSpec
    router: str = "mlp.gate"
    router_bias: bool = False
    correction: str | None = None
    shared: GatedMlpSpec | None = None
    shared_gate: str | None = None


class Router:
    """Scores the experts, in float32: rounding could send a token elsewhere on a near tie."""

    operations = frozenset({"moe.route"})

    def __init__(self, site: LayerBuildContext, spec: MoeSpec) -> None:
        self._spec, self._name = spec, site.tensor_name(spec.router)
        self._size = (spec.experts.count, site.hidden)
        self._method = site.method.exact()
        wide = replace(site.build, dtype=torch.float32)
        shape = LinearShape(site.hidden, spec.experts.count, spec.router_bias)
        self._weights = self._method.create(shape, wide)
        self._correction = self._correction_name = None
        if spec.correction is not None:
            self._correction = wide.empty(spec.experts.count)
            self._correction_name = site.tensor_name(spec.correction)

    def __call__(self, ctx: ForwardContext, x: Tensor) -> tuple[Tensor, Tensor]:
        """Route: x (T, D)  ->  experts (T, K) int64 and their weights (T, K) float32."""
        logits = self._method.apply(self._weights, x.float())
        return ctx.ops.route(logits, self._correction, self._spec.routing)

    def sources(self) -> Iterator[WeightSource]:
        """The weight and the biases."""
        yield self._source("weight", self._size)
        if self._spec.router_bias:
            yield self._source("bias", self._size[:1])
        if self._correction_name is not None and self._correction is not None:
            name, kept = self._correction_name, self._correction
            yield WeightSource(name, self._size[:1], lambda tensor: void(kept.copy_(tensor)))

    def pack(self) -> None:
        """Do nothing: the weight is multiplied as loaded."""
        self._method.pack(self._weights)

    def _source(self, field: str, size: tuple[int, ...]) -> WeightSource:
        cut = RankSlice(slice(None), slice(None), into=0)
        return WeightSource(
            f"{self._name}.{field}",
            size,
            lambda tensor: self._method.load(self._weights, field, tensor, cut),
        )


class MixtureOfExperts:
    """A mixture of experts. Axes: T tokens, D hidden size."""

    def __init__(self, site: LayerBuildContext, spec: MoeSpec) -> None:
        self._router = Router(site, spec)
        self._experts = Experts(site, spec.experts)
        self._shared = None if spec.shared is None else GatedMlp(site, spec.shared)
        self._gate = None
        if spec.shared_gate is not None:
            self._gate = ReplicatedLinear(
                site.tensor_name(spec.shared_gate),
                site.hidden,
                1,
                bias=False,
                build=site.build,
                method=site.method.exact(),
            )

    @property
    def operations(self) -> frozenset[str]:
        """The kernels of all parts."""
        shared = frozenset[str]() if self._shared is None else self._shared.operations
        return self._router.operations | self._experts.operations | shared

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """Apply the block: x (T, D)  ->  (T, D)."""
        chosen, shares = self._router(ctx, x)
        routed = ctx.tp.all_reduce(self._experts(ctx, x, chosen, shares))
        if self._shared is None:
            return routed
        shared = self._shared(ctx, x)
        if self._gate is not None:
            shared = shared * sigmoid(self._gate(ctx, x))
        return routed + shared

    def sources(self) -> Iterator[WeightSource]:
        """The tensors of all parts."""
        for part in (self._router, self._experts, self._shared, self._gate):
            if part is not None:
                yield from part.sources()

    def pack(self) -> None:
        """Prepare weights for computing; called once all sources are loaded."""
        for part in (self._router, self._experts, self._shared, self._gate):
            if part is not None:
                part.pack()
