"""The normalisation between blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.layers.weights import Build, WeightSource, whole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from antiphon.layers.context import ForwardContext


class RmsNorm:
    """Root-mean-square norm with a weight, whole on every rank."""

    def __init__(self, name: str, size: int, eps: float, build: Build) -> None:
        self.name = name
        self._eps = eps
        self._weight = build.empty(size)

    @property
    def weight(self) -> Tensor:
        """What it multiplies by, (size,)."""
        return self._weight

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """Transform x (T, hidden)  ->  (T, hidden)."""
        return ctx.ops.rmsnorm(x, self._weight, self._eps)

    def add(self, ctx: ForwardContext, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The normalised sum of both, and the sum: the residual stream from here on."""
        return ctx.ops.add_rmsnorm(x, residual, self._weight, self._eps)

    def sources(self) -> Iterator[WeightSource]:
        """Its weight."""
        return whole(f"{self.name}.weight", self._weight)
