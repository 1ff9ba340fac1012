"""A mixture of experts as one call of the CPU extension: csrc/experts.h.

Axes: T tokens, D hidden size, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from antiphon.kernels.cpu import extension

if TYPE_CHECKING:
    from torch import Tensor

    from antiphon.kernels.activation import ActivationKind
    from antiphon.kernels.cpu.linear import CompiledLinear
    from antiphon.kernels.routing import RoutingSpec


class CompiledExperts(Protocol):
    """Experts of the CPU extension. The bits of a row do not depend on the other rows."""

    def forward(self, x: Tensor) -> Tensor:
        """Route, apply the chosen experts that are here, and sum: (T, D)  ->  (T, D)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedExperts:
    """The packed linears of a mixture of experts, and what is computed with them."""

    routing: RoutingSpec
    router: CompiledLinear  # to E outputs, in float32
    correction: Tensor | None  # (E,) float32, as in `route`
    # Gate and up of each expert that is here, in halves: those from `first` on.
    gate_up: list[CompiledLinear]
    down: list[CompiledLinear]
    first: int
    activation: ActivationKind | tuple[float, float]  # or alpha and limit of a clamped swish
    apply_router_weight_on_input: bool = False
    # Gate and up, and down, of an expert with SiLU that takes every token.
    shared: tuple[CompiledLinear, CompiledLinear] | None = None
    shared_gate: CompiledLinear | None = None  # to the number whose sigmoid scales its output

    def compile(self) -> CompiledExperts:
        """Make the call. Weights may be written later.

        Raises:
            RuntimeError: The linears do not fit each other.
        """
        library, routing, activation = extension.load(), self.routing, self.activation
        clamped = isinstance(activation, tuple)
        name = "clamped_swish" if clamped else activation
        alpha, limit = activation if clamped else (0.0, 0.0)
        shared_gate_up, shared_down = self.shared or (None, None)
        return cast(
            "CompiledExperts",
            library.MixtureOfExperts(
                router=self.router,
                first=self.first,
                gate_up=self.gate_up,
                down=self.down,
                shared_gate_up=shared_gate_up,
                shared_down=shared_down,
                shared_gate=self.shared_gate,
                top_k=routing.top_k,
                sigmoid=routing.scoring == "sigmoid",
                renormalised=routing.renormalised,
                factor=routing.factor,
                groups=routing.groups,
                groups_kept=routing.groups_kept,
                group_best=routing.group_best,
                correction=self.correction,
                activation=getattr(library.Activation, name),
                alpha=alpha,
                limit=limit,
                share_on_input=self.apply_router_weight_on_input,
            ),
        )
