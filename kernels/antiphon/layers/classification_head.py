"""The head of a classifier or reward model: scores of labels, or a single reward.

Axes: R texts, D hidden size, N labels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from antiphon.layers.linear import ReplicatedLinear
from antiphon.layers.norm import build_norm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from antiphon.kernels.activation import ActivationKind
    from antiphon.layers.context import ForwardContext
    from antiphon.layers.methods import LinearMethod
    from antiphon.layers.norm import NormSpec
    from antiphon.layers.weights import BuildContext, WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSpec:
    """norm(activation(linear(x))), as wide as x.

    Attributes:
        name: Of the linear in the checkpoint.
        norm: None: no norm.
        norm_name: Of that norm.
    """

    name: str
    activation: ActivationKind
    bias: bool = True
    norm: NormSpec | None = None
    norm_name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassificationHeadSpec:
    """Class scores of pooled texts.

    Attributes:
        labels: N; a reward model has one.
        name: Of the linear that computes them.
        bias: Whether it has a bias.
        dense: A dense layer before it; None: no such layer.
    """

    labels: int
    name: str = "score"
    bias: bool = False
    dense: DenseSpec | None = None


class ClassificationHead:
    """Scores of pooled texts. It is small, and unquantized whatever the layers' weight format.

    Replicated on every rank.
    """

    def __init__(
        self, spec: ClassificationHeadSpec, hidden: int, build: BuildContext, method: LinearMethod
    ) -> None:
        build, method = replace(build, quantization=None), method.exact()
        self._dense = None if spec.dense is None else _Dense(spec.dense, hidden, build, method)
        self._linear = ReplicatedLinear(
            spec.name, hidden, spec.labels, bias=spec.bias, build=build, method=method
        )

    @property
    def operations(self) -> frozenset[str]:
        """Names of the kernels that it calls."""
        return frozenset[str]() if self._dense is None else self._dense.operations

    def __call__(self, ctx: ForwardContext, pooled: Tensor) -> Tensor:
        """Score pooled (R, D)  ->  (R, N) float32 raw logits."""
        if self._dense is not None:
            pooled = self._dense(ctx, pooled)
        return self._linear(ctx, pooled).float()

    def sources(self) -> Iterator[WeightSource]:
        """The tensors of all its linears and norms."""
        if self._dense is not None:
            yield from self._dense.sources()
        yield from self._linear.sources()

    def pack(self) -> None:
        """Prepare weights for computing; called once all sources are loaded."""
        if self._dense is not None:
            self._dense.pack()
        self._linear.pack()


class _Dense:
    """The dense layer between a pooled vector and its scores."""

    def __init__(
        self, spec: DenseSpec, hidden: int, build: BuildContext, method: LinearMethod
    ) -> None:
        self._activation: ActivationKind = spec.activation
        self._linear = ReplicatedLinear(
            spec.name, hidden, hidden, bias=spec.bias, build=build, method=method
        )
        self._norm = None
        if spec.norm is not None:
            self._norm = build_norm(spec.norm, spec.norm_name, hidden, build)

    @property
    def operations(self) -> frozenset[str]:
        own = frozenset({"activation.plain"})
        return own if self._norm is None else own | self._norm.operations

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        y = ctx.ops.activate(self._linear(ctx, x), self._activation)
        return y if self._norm is None else self._norm(ctx, y)

    def sources(self) -> Iterator[WeightSource]:
        yield from self._linear.sources()
        if self._norm is not None:
            yield from self._norm.sources()

    def pack(self) -> None:
        self._linear.pack()
