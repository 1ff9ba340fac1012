"""Weight formats of linears in memory: each is a row of `METHODS`.

Layers define the sharding over ranks, a `LinearMethod` the representation. Axes: T tokens,
I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch.nn.functional as F  # noqa: N812 (its name in every torch program)

from antiphon.kernels.cpu import extension
from antiphon.kernels.cpu.linear import DTYPE_NAMES, CompiledLinear, Format, PackedWeight
from antiphon.layers.quantization.storage import Int8Weight, LoadedWeight, dequantized, slice_weight

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor

    from antiphon.layers.weights import BuildContext


@dataclass(frozen=True, slots=True)
class LinearShape:
    """One rank's linear.

    Attributes:
        bias: Whether it has one.
        halves: Its outputs are a gate and an up projection of equal width.
    """

    inputs: int
    outputs: int
    bias: bool
    halves: bool = False


@dataclass(frozen=True, slots=True)
class RankSlice:
    """A slice of a checkpoint tensor and its target on this rank.

    Attributes:
        outputs: Rows of the whole tensor that this rank has.
        inputs: Columns of it; a bias has none.
        into: First row of this rank's weight that they fill.
    """

    outputs: slice
    inputs: slice
    into: int

    def of(self, field: str, tensor: LoadedWeight) -> LoadedWeight:
        """The slice of a `weight` or a `bias`."""
        if field == "weight":
            return slice_weight(tensor, self.outputs, self.inputs)
        return dequantized(tensor)[self.outputs]


@dataclass(slots=True)
class LinearWeights:
    """The weights of one linear: tensors as its method names them, or a packed copy."""

    tensors: dict[str, Tensor]
    packed: PackedWeight | None = None


class LinearMethod(Protocol):
    """How the weights of a linear are stored in memory and multiplied."""

    @property
    def invariant(self) -> bool:
        """Whether multiplication is batch-invariant: a row's bits depend on that row alone."""
        ...

    def create(self, shape: LinearShape, build: BuildContext) -> LinearWeights:
        """Allocate the weights of a linear."""
        ...

    def load(
        self, weights: LinearWeights, field: str, tensor: LoadedWeight, cut: RankSlice
    ) -> None:
        """Load a slice of the checkpoint's `weight` or `bias`."""
        ...

    def pack(self, weights: LinearWeights) -> None:
        """Convert loaded weights to the form that `apply` reads; called once, after loading."""
        ...

    def apply(self, weights: LinearWeights, x: Tensor) -> Tensor:
        """Multiply: x (T, I)  ->  (T, O), bias added."""
        ...

    def apply_wide(self, weights: LinearWeights, x: Tensor) -> Tensor:
        """Multiply: x (T, I)  ->  (T, O) float32."""
        ...

    def rows(self, weights: LinearWeights, outputs: Tensor) -> Tensor:
        """Look up the weights of outputs (N,) int64  ->  (N, I)."""
        ...

    def for_table(self) -> LinearMethod:
        """The method of an embedding table that is multiplied, too."""
        ...

    def exact(self) -> LinearMethod:
        """The unquantized method that multiplies like this one."""
        ...


class PlainLinearMethod:
    """Weights in the model's dtype, multiplied by torch."""

    invariant = False
    """Measured: in float32, bits depend on the number of rows: 1, 2 and 3, or 4 and more."""

    def create(self, shape: LinearShape, build: BuildContext) -> LinearWeights:
        """A weight (O, I), and a bias (O,) if there is one."""
        tensors = {"weight": build.empty(shape.outputs, shape.inputs)}
        if shape.bias:
            tensors["bias"] = build.empty(shape.outputs)
        return LinearWeights(tensors)

    def load(
        self, weights: LinearWeights, field: str, tensor: LoadedWeight, cut: RankSlice
    ) -> None:
        """Copy the slice, converted to the model's dtype."""
        part = dequantized(cut.of(field, tensor))
        weights.tensors[field][cut.into : cut.into + len(part)].copy_(part)

    def pack(self, weights: LinearWeights) -> None:
        """Do nothing: weights are multiplied as they are."""

    def apply(self, weights: LinearWeights, x: Tensor) -> Tensor:
        """Multiply: x (T, I)  ->  (T, O)."""
        return F.linear(x, weights.tensors["weight"], weights.tensors.get("bias"))

    def apply_wide(self, weights: LinearWeights, x: Tensor) -> Tensor:
        """Multiply, with an intermediate rounding to the model's dtype."""
        return self.apply(weights, x).float()

    def rows(self, weights: LinearWeights, outputs: Tensor) -> Tensor:
        """Look up the weights of outputs (N,)  ->  (N, I)."""
        return F.embedding(outputs, weights.tensors["weight"])

    def for_table(self) -> PlainLinearMethod:
        """The same method."""
        return self

    def exact(self) -> PlainLinearMethod:
        """The same method."""
        return self


@dataclass(frozen=True, slots=True)
class PackedLinearMethod:
    """Weights packed for the CPU kernels, in one of their formats."""

    format: Format

    @property
    def invariant(self) -> bool:
        """True: the sum of an output runs in one order."""
        return True

    def create(self, shape: LinearShape, build: BuildContext) -> LinearWeights:
        """Allocate zero panels; weights are packed while loading, so there is no second copy."""
        packed = PackedWeight(
            shape.inputs,
            shape.outputs,
            bias=shape.bias,
            dtype=build.dtype,
            format_=self.format,
            halves=shape.halves,
        )
        return LinearWeights({}, packed)

    def load(
        self, weights: LinearWeights, field: str, tensor: LoadedWeight, cut: RankSlice
    ) -> None:
        """Write the slice into the panels, in the model's dtype or quantized."""
        assert weights.packed is not None, "created by this method"
        part = cut.of(field, tensor)
        if field != "weight":
            weights.packed.write_bias(cut.into, dequantized(part))
        elif isinstance(part, Int8Weight) and self.format != "packed":
            weights.packed.write_int8(cut.into, part.steps, part.scales)
        else:
            weights.packed.write(cut.into, dequantized(part))

    def pack(self, weights: LinearWeights) -> None:
        """Do nothing: weights are packed while loading."""

    def apply(self, weights: LinearWeights, x: Tensor) -> Tensor:
        """Multiply: x (T, I)  ->  (T, O)."""
        return _linear(weights).multiply(x)

    def apply_wide(self, weights: LinearWeights, x: Tensor) -> Tensor:
        """Multiply: x (T, I)  ->  (T, O) float32, the unrounded sums."""
        return _linear(weights).multiply_wide(x)

    def rows(self, weights: LinearWeights, outputs: Tensor) -> Tensor:
        """Look up the weights of outputs (N,)  ->  (N, I)."""
        return _linear(weights).rows(outputs)

    def for_table(self) -> PackedLinearMethod:
        """Activations are not quantized when computing logits: only the table is."""
        return PackedLinearMethod("int8") if self.format == "int8_dynamic" else self

    def exact(self) -> PackedLinearMethod:
        """Packed, without quantization."""
        return PackedLinearMethod("packed")


METHODS: Mapping[str, LinearMethod] = {
    "plain": PlainLinearMethod(),
    "packed": PackedLinearMethod("packed"),
    "int8": PackedLinearMethod("int8"),
    "int8_dynamic": PackedLinearMethod("int8_dynamic"),
}
"""All methods, by their name in `model.linear`."""


def unsupported_reason(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a method of `METHODS` is not supported there, or None."""
    if name == "plain":
        return None
    if device.type != "cpu":
        return "it runs on the CPU only"
    if dtype not in DTYPE_NAMES:
        return f"the CPU's own kernels do not compute in {str(dtype).removeprefix('torch.')}"
    return extension.unavailable_reason()


def _linear(weights: LinearWeights) -> CompiledLinear:
    assert weights.packed is not None, "created by this method"
    return weights.packed.linear
