"""The head of a classifier or reward model: scores of labels, or a single reward.

Axes: R texts, D hidden size, N labels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from antiphon.layers.linear import replicated
from antiphon.layers.norm import NormSpec, build_norm
from antiphon.layers.weights import BuildContext, Module

if TYPE_CHECKING:
    from torch import Tensor

    from antiphon.kernels.activation import ActivationKind
    from antiphon.layers.context import ForwardContext
    from antiphon.layers.methods import LinearMethod


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSpec:
    name: str  # of the linear in the checkpoint
    activation: ActivationKind
    bias: bool = True
    norm: NormSpec | None = None  # none: no norm
    norm_name: str = ""  # of that norm


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassificationHeadSpec:
    labels: int  # N; a reward model has one
    name: str = "score"  # of the linear that computes them
    bias: bool = False  # whether it has a bias
    dense: DenseSpec | None = None  # A dense layer before it; None: no such layer


class ClassificationHead(Module):
    """Scores of pooled texts. It is small, and unquantized whatever the layers' weight format.

    Replicated on every rank.
    """

    def __init__(
        self, spec: ClassificationHeadSpec, hidden: int, build: BuildContext, method: LinearMethod
    ) -> None:
        build, method = replace(build, quantization=None), method.exact()
        self._dense = None if spec.dense is None else _Dense(spec.dense, hidden, build, method)
        self._linear = replicated(
            spec.name, hidden, spec.labels, bias=spec.bias, build=build, method=method
        )
        self.children = (self._dense, self._linear)

    def __call__(self, ctx: ForwardContext, pooled: Tensor) -> Tensor:
        """Score pooled (R, D)  ->  (R, N) float32 raw logits."""
        if self._dense is not None:
            pooled = self._dense(ctx, pooled)
        return self._linear(ctx, pooled).float()


class _Dense(Module):
    kernels = frozenset({"activation.plain"})

    def __init__(
        self, spec: DenseSpec, hidden: int, build: BuildContext, method: LinearMethod
    ) -> None:
        self._activation: ActivationKind = spec.activation
        self._linear = replicated(
            spec.name, hidden, hidden, bias=spec.bias, build=build, method=method
        )
        self._norm = None
        if spec.norm is not None:
            self._norm = build_norm(spec.norm, spec.norm_name, hidden, build)
        self.children = (self._linear, self._norm)

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        y = ctx.ops.activate(self._linear(ctx, x), self._activation)
        return y if self._norm is None else self._norm(ctx, y)
