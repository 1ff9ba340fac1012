"""How a linear's weights are kept and multiplied: each way is a row of `METHODS`.

The layers own the cut over ranks, a `LinearMethod` owns the representation. Axes: T tokens,
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
        halves: Its outputs are a gate and what it gates, as many of each.
    """

    inputs: int
    outputs: int
    bias: bool
    halves: bool = False


@dataclass(frozen=True, slots=True)
class RankSlice:
    """Which part of a whole checkpoint tensor goes where on this rank.

    Attributes:
        outputs: Rows of the whole tensor that this rank takes.
        inputs: Columns of it; a bias has none.
        into: First row of this rank's weight that they fill.
    """

    outputs: slice
    inputs: slice
    into: int

    def of(self, field: str, tensor: LoadedWeight) -> LoadedWeight:
        """The part of a `weight` or a `bias`."""
        if field == "weight":
            return slice_weight(tensor, self.outputs, self.inputs)
        return dequantized(tensor)[self.outputs]


@dataclass(slots=True)
class LinearWeights:
    """What one linear keeps: tensors as its method names them, or a packed copy."""

    tensors: dict[str, Tensor]
    packed: PackedWeight | None = None


class LinearMethod(Protocol):
    """How a linear's weights are kept and multiplied."""

    @property
    def invariant(self) -> bool:
        """Whether a row's bits depend on that row alone, however many are multiplied."""
        ...

    def create(self, shape: LinearShape, build: BuildContext) -> LinearWeights:
        """Room for the weights of a linear."""
        ...

    def load(
        self, weights: LinearWeights, field: str, tensor: LoadedWeight, cut: RankSlice
    ) -> None:
        """Put a part of the checkpoint's `weight` or `bias` into place."""
        ...

    def pack(self, weights: LinearWeights) -> None:
        """Bring loaded weights into the form that `apply` reads; called once, after loading."""
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
        """The method of a table that is looked up as well as multiplied."""
        ...

    def exact(self) -> LinearMethod:
        """The method that multiplies as this one does, of weights that are kept as they come."""
        ...


class PlainLinearMethod:
    """Weights in the model's own number format, multiplied by torch."""

    invariant = False
    """Measured: in float32, rows fall into classes by their number: 1, 2 and 3, 4 and more."""

    def create(self, shape: LinearShape, build: BuildContext) -> LinearWeights:
        """A weight (O, I), and a bias (O,) if there is one."""
        tensors = {"weight": build.empty(shape.outputs, shape.inputs)}
        if shape.bias:
            tensors["bias"] = build.empty(shape.outputs)
        return LinearWeights(tensors)

    def load(
        self, weights: LinearWeights, field: str, tensor: LoadedWeight, cut: RankSlice
    ) -> None:
        """Copy the part, converted to the model's number format."""
        part = dequantized(cut.of(field, tensor))
        weights.tensors[field][cut.into : cut.into + len(part)].copy_(part)

    def pack(self, weights: LinearWeights) -> None:
        """Nothing: they are multiplied as they are."""

    def apply(self, weights: LinearWeights, x: Tensor) -> Tensor:
        """Multiply: x (T, I)  ->  (T, O)."""
        return F.linear(x, weights.tensors["weight"], weights.tensors.get("bias"))

    def apply_wide(self, weights: LinearWeights, x: Tensor) -> Tensor:
        """Multiply, rounding to the model's number format on the way."""
        return self.apply(weights, x).float()

    def rows(self, weights: LinearWeights, outputs: Tensor) -> Tensor:
        """Look up the weights of outputs (N,)  ->  (N, I)."""
        return F.embedding(outputs, weights.tensors["weight"])

    def for_table(self) -> PlainLinearMethod:
        """The same."""
        return self

    def exact(self) -> PlainLinearMethod:
        """The same."""
        return self


@dataclass(frozen=True, slots=True)
class PackedLinearMethod:
    """Weights packed for the CPU's own kernels, in one of their formats."""

    format: Format

    @property
    def invariant(self) -> bool:
        """They are: the sum of an output runs in one order."""
        return True

    def create(self, shape: LinearShape, build: BuildContext) -> LinearWeights:
        """Panels of zeros; the weights are packed as they come, so there is never a second copy."""
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
        """Write the part into the panels, in the model's number format or quantized."""
        assert weights.packed is not None, "created by this method"
        part = cut.of(field, tensor)
        if field != "weight":
            weights.packed.write_bias(cut.into, dequantized(part))
        elif isinstance(part, Int8Weight) and self.format != "packed":
            weights.packed.write_int8(cut.into, part.steps, part.scales)
        else:
            weights.packed.write(cut.into, dequantized(part))

    def pack(self, weights: LinearWeights) -> None:
        """Nothing: they came packed."""

    def apply(self, weights: LinearWeights, x: Tensor) -> Tensor:
        """Multiply: x (T, I)  ->  (T, O)."""
        return _linear(weights).multiply(x)

    def apply_wide(self, weights: LinearWeights, x: Tensor) -> Tensor:
        """Multiply: x (T, I)  ->  (T, O) float32, as it was summed."""
        return _linear(weights).multiply_wide(x)

    def rows(self, weights: LinearWeights, outputs: Tensor) -> Tensor:
        """Look up the weights of outputs (N,)  ->  (N, I)."""
        return _linear(weights).rows(outputs)

    def for_table(self) -> PackedLinearMethod:
        """Hidden states that are scored keep their precision: only the table is rounded."""
        return PackedLinearMethod("int8") if self.format == "int8_dynamic" else self

    def exact(self) -> PackedLinearMethod:
        """Packed, and not rounded."""
        return PackedLinearMethod("packed")


METHODS: Mapping[str, LinearMethod] = {
    "plain": PlainLinearMethod(),
    "packed": PackedLinearMethod("packed"),
    "int8": PackedLinearMethod("int8"),
    "int8_dynamic": PackedLinearMethod("int8_dynamic"),
}
"""Every way, as `model.linear` names them."""


def unsupported_reason(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a method of `METHODS` cannot run there, or None."""
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
