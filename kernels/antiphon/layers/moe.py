"""Mixture of experts: a router, the routed experts, and a shared expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from antiphon.kernels.activation import sigmoid
from antiphon.layers.experts import Experts, ExpertsSpec
from antiphon.layers.methods import WHOLE_SLICE, LinearShape
from antiphon.layers.mlp import GatedMlp, GatedMlpSpec
from antiphon.layers.sublayer import LayerBuildContext, Sublayer
from antiphon.layers.weights import Module, WeightSource, void

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from antiphon.kernels.routing import RoutingSpec
    from antiphon.layers.context import ForwardContext


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
        self._correction = self._correction_name = None
        if spec.correction is not None:
            self._correction = torch.empty(spec.experts.count, dtype=torch.float32, device=device)
            self._correction_name = site.tensor_name(spec.correction)

    def __call__(self, ctx: ForwardContext, x: Tensor) -> tuple[Tensor, Tensor]:
        """Route: x (T, D)  ->  experts (T, K) int64 and their weights (T, K) float32."""
        logits = self._weights.apply(x.float())
        return ctx.ops.route(logits, self._correction, self._spec.routing)

    def sources(self) -> Iterator[WeightSource]:
        yield self._source("weight", self._size)
        if self._spec.router_bias:
            yield self._source("bias", self._size[:1])
        if self._correction_name is not None and self._correction is not None:
            name, kept = self._correction_name, self._correction
            yield WeightSource(name, self._size[:1], lambda tensor: void(kept.copy_(tensor)))

    def _source(self, field: str, size: tuple[int, ...]) -> WeightSource:
        return WeightSource(
            f"{self._name}.{field}",
            size,
            lambda tensor: self._weights.load(field, tensor, WHOLE_SLICE),
        )


class MixtureOfExperts(Sublayer):
    def __init__(self, site: LayerBuildContext, spec: MoeSpec) -> None:
        self._router = Router(site, spec)
        self._experts = Experts(site, spec.experts)
        self._shared = None if spec.shared is None else GatedMlp(site, spec.shared)
        self._gate = None
        if spec.shared_gate is not None:
            self._gate = site.replicated(
                spec.shared_gate, 1, bias=False, method=site.method.exact()
            )
        parts = (self._router, self._experts, self._shared, self._gate)
        self.children = tuple(part for part in parts if part is not None)

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        chosen, shares = self._router(ctx, x)
        routed = ctx.tp.all_reduce(self._experts(ctx, x, chosen, shares))
        if self._shared is None:
            return routed
        shared = self._shared(ctx, x)
        if self._gate is not None:
            shared = shared * sigmoid(self._gate(ctx, x))
        return routed + shared
