"""The normalisations of a decoder; a kind is chosen by its `NormSpec`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from antiphon.kernels.norm import NormWeights
from antiphon.layers.weights import BuildContext, Module, WeightSource, replicated_source

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from antiphon.kernels.norm import NormKind as KernelNorm
    from antiphon.layers.context import ForwardContext

NormKind = Literal["rms", "rms_wide", "rms_one_plus", "layer"]
"""The kinds of the kernels, and `rms_one_plus`, which is wide and multiplies by 1 + weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    kind: NormKind = "rms"
    eps: float  # added inside the root
    bias: bool = False  # whether a `layer` norm has a bias
    affine: bool = True  # whether it has a weight at all

    @property
    def kernel(self) -> KernelNorm:
        return "rms_wide" if self.kind == "rms_one_plus" else self.kind


class Norm(Module):
    # For the fused decoder; None: it has no such norm.
    weights: NormWeights | None = None

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """Normalise the last dimension of x."""
        raise NotImplementedError

    def add(self, ctx: ForwardContext, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The normalised sum of both, and the sum: the residual stream from here on."""
        total = x + residual
        return self(ctx, total), total


def build_norm(spec: NormSpec, name: str, size: int, build: BuildContext) -> Norm:
    """Build the norm that a spec describes; its tensors are `name`.weight and `name`.bias."""
    match spec.kind:
        case "rms":
            return RmsNorm(spec, name, size, build)
        case "rms_wide" | "rms_one_plus":
            return WideRmsNorm(spec, name, size, build)
        case "layer":
            return LayerNorm(spec, name, size, build)


class RmsNorm(Norm):
    kernels = frozenset({"norm.rmsnorm", "norm.add_rmsnorm"})

    def __init__(self, spec: NormSpec, name: str, size: int, build: BuildContext) -> None:
        self.name = name
        self.eps = spec.eps
        self._affine = spec.affine
        self.weight = build.empty(size).fill_(1.0)
        self.weights = NormWeights(self.weight)

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        return ctx.ops.rmsnorm(x, self.weight, self.eps)

    def add(self, ctx: ForwardContext, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return ctx.ops.add_rmsnorm(x, residual, self.weight, self.eps)

    def sources(self) -> Iterator[WeightSource]:
        if self._affine:
            yield from replicated_source(f"{self.name}.weight", self.weight)


class WideRmsNorm(Norm):
    """RMSNorm, rounded once, after multiplying by the weight."""

    kernels = frozenset({"norm.rmsnorm_wide"})

    def __init__(self, spec: NormSpec, name: str, size: int, build: BuildContext) -> None:
        self.name = name
        self._eps = spec.eps
        self._plus = 1.0 if spec.kind == "rms_one_plus" else 0.0
        # In float32: one plus a small weight needs more digits than the weight.
        self._weight = torch.ones(size, dtype=torch.float32, device=build.device)
        self.weights = NormWeights(self._weight)
        self._affine = spec.affine

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        return ctx.ops.rmsnorm_wide(x, self._weight, self._eps)

    def sources(self) -> Iterator[WeightSource]:
        if self._affine:
            yield WeightSource(f"{self.name}.weight", tuple(self._weight.shape), self._load)

    def _load(self, tensor: Tensor) -> None:
        self._weight.copy_(tensor).add_(self._plus)


class LayerNorm(Norm):
    kernels = frozenset({"norm.layernorm"})

    def __init__(self, spec: NormSpec, name: str, size: int, build: BuildContext) -> None:
        self.name = name
        self._eps = spec.eps
        self._weight = build.empty(size) if spec.affine else None
        self._bias = build.empty(size) if spec.bias else None
        if self._weight is not None:
            self.weights = NormWeights(self._weight, self._bias)

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        return ctx.ops.layernorm(x, self._weight, self._bias, self._eps)

    def sources(self) -> Iterator[WeightSource]:
        for field, tensor in (("weight", self._weight), ("bias", self._bias)):
            if tensor is not None:
                yield from replicated_source(f"{self.name}.{field}", tensor)
