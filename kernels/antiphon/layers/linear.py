"""Linear layers: how they are cut over ranks, apart from how their weights are stored.

A `LinearMethod` owns the representation (plain here, a quantized one is another row); the layers
own the cut. Axes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch.nn.functional as F  # noqa: N812 (its name in every torch program)

from antiphon.layers.weights import Build, WeightSource, whole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from antiphon.layers.context import ForwardContext


@dataclass(frozen=True, slots=True)
class LinearShape:
    """Inputs and outputs of one rank's linear, and whether it has a bias."""

    inputs: int
    outputs: int
    bias: bool


@dataclass(frozen=True, slots=True)
class Cut:
    """Which part of a whole checkpoint tensor goes where on this rank.

    Attributes:
        outputs: Rows of the whole tensor that this rank takes.
        inputs: Columns of it; a bias has none.
        into: First row of this rank's weight that they fill.
    """

    outputs: slice
    inputs: slice
    into: int


@dataclass(slots=True)
class LinearWeights:
    """Tensors of one linear, named as its method names them."""

    tensors: dict[str, Tensor]


class LinearMethod(Protocol):
    """How a linear's weights are stored and multiplied."""

    def create(self, shape: LinearShape, build: Build) -> LinearWeights:
        """Room for the weights of a linear."""
        ...

    def load(self, weights: LinearWeights, field: str, tensor: Tensor, cut: Cut) -> None:
        """Copy a part of the checkpoint's `weight` or `bias` into place."""
        ...

    def pack(self, weights: LinearWeights) -> None:
        """Bring loaded weights into the form that `apply` reads; called once, after loading."""
        ...

    def apply(self, weights: LinearWeights, x: Tensor) -> Tensor:
        """Multiply: x (T, I)  ->  (T, O), bias added."""
        ...


class PlainLinear:
    """Weights in the model's own number format."""

    def create(self, shape: LinearShape, build: Build) -> LinearWeights:
        """A weight (O, I), and a bias (O,) if there is one."""
        tensors = {"weight": build.empty(shape.outputs, shape.inputs)}
        if shape.bias:
            tensors["bias"] = build.empty(shape.outputs)
        return LinearWeights(tensors)

    def load(self, weights: LinearWeights, field: str, tensor: Tensor, cut: Cut) -> None:
        """Copy the part, converted to the model's number format."""
        part = tensor[cut.outputs]
        if field == "weight":
            part = part[:, cut.inputs]
        weights.tensors[field][cut.into : cut.into + len(part)].copy_(part)

    def pack(self, weights: LinearWeights) -> None:
        """Nothing: they are multiplied as they are."""

    def apply(self, weights: LinearWeights, x: Tensor) -> Tensor:
        """Multiply: x (T, I)  ->  (T, O)."""
        return F.linear(x, weights.tensors["weight"], weights.tensors.get("bias"))


@dataclass(frozen=True, slots=True)
class Part:
    """One of the checkpoint's linears inside a fused one.

    Attributes:
        name: Of the checkpoint's linear.
        outputs: Of the whole linear.
        shards: Equal pieces that it is cut into; fewer than ranks means that neighbours share a
            piece, as key and value heads do when there are fewer of them than ranks.
    """

    name: str
    outputs: int
    shards: int

    def piece(self) -> int:
        """Outputs on one rank."""
        return self.outputs // self.shards

    def start(self, rank: int, ranks: int) -> int:
        """First output that a rank keeps."""
        return rank * self.shards // ranks * self.piece()


class ColumnLinear:
    """Outputs cut over ranks; several of the checkpoint's linears with one input run as one."""

    def __init__(
        self,
        name: str,
        inputs: int,
        parts: tuple[Part, ...],
        *,
        bias: bool,
        build: Build,
        method: LinearMethod,
    ) -> None:
        for part in parts:
            if part.outputs % part.shards or build.tp.ranks % part.shards:
                raise ValueError(
                    f"{part.name}: {part.shards} shards do not fit {build.tp.ranks} ranks"
                )
        self.name = name
        self._parts = parts
        self._tp = build.tp
        self._method = method
        self._inputs = inputs
        self._bias = bias
        outputs = sum(part.piece() for part in parts)
        self._weights = method.create(LinearShape(inputs, outputs, bias), build)

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """Multiply: x (T, I)  ->  (T, O / ranks), the parts side by side."""
        return ctx.adapt(self.name, x, self._method.apply(self._weights, x))

    def sources(self) -> Iterator[WeightSource]:
        """The checkpoint's tensors of each part."""
        into = 0
        for part in self._parts:
            start = part.start(self._tp.rank, self._tp.ranks)
            cut = Cut(slice(start, start + part.piece()), slice(None), into)
            yield self._source(part, "weight", (part.outputs, self._inputs), cut)
            if self._bias:
                yield self._source(part, "bias", (part.outputs,), cut)
            into += part.piece()

    def pack(self) -> None:
        """Called once all sources are loaded."""
        self._method.pack(self._weights)

    def _source(self, part: Part, field: str, shape: tuple[int, ...], cut: Cut) -> WeightSource:
        return WeightSource(
            f"{part.name}.{field}",
            shape,
            lambda tensor: self._method.load(self._weights, field, tensor, cut),
        )


class RowLinear:
    """Inputs cut over ranks; the partial outputs are summed, then the bias is added once."""

    def __init__(
        self,
        name: str,
        inputs: int,
        outputs: int,
        *,
        bias: bool,
        build: Build,
        method: LinearMethod,
    ) -> None:
        self.name = name
        self._inputs, self._outputs = inputs, outputs
        self._method = method
        share = build.share(inputs, name)
        self._cut = Cut(
            slice(None), slice(build.tp.rank * share, (build.tp.rank + 1) * share), into=0
        )
        self._weights = method.create(LinearShape(share, outputs, bias=False), build)
        self._bias = build.empty(outputs) if bias else None

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """Multiply: x (T, I / ranks)  ->  (T, O), the same on every rank."""
        partial = ctx.adapt(self.name, x, self._method.apply(self._weights, x))
        total = ctx.tp.all_reduce(partial)
        return total if self._bias is None else total + self._bias

    def sources(self) -> Iterator[WeightSource]:
        """The checkpoint's weight, and its bias if it has one."""
        yield WeightSource(
            f"{self.name}.weight",
            (self._outputs, self._inputs),
            lambda tensor: self._method.load(self._weights, "weight", tensor, self._cut),
        )
        if self._bias is not None:
            yield from whole(f"{self.name}.bias", self._bias)

    def pack(self) -> None:
        """Called once all sources are loaded."""
        self._method.pack(self._weights)


class ReplicatedLinear(ColumnLinear):
    """Whole on every rank, for small linears whose cut would cost a collective."""

    def __init__(
        self,
        name: str,
        inputs: int,
        outputs: int,
        *,
        bias: bool,
        build: Build,
        method: LinearMethod,
    ) -> None:
        part = Part(name, outputs, shards=1)
        super().__init__(name, inputs, (part,), bias=bias, build=build, method=method)
