"""The interface of storage layouts: the tensors of a quantized weight, and their dequantization.

Axes: O outputs, I inputs, G groups of inputs that share a scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of weights that are not quantized."""
SCALES = (*FLOATS, torch.float8_e8m0fnu)
"""Dtypes of scales; the last has powers of two only."""
ANY = -1
"""A length that is not known in advance."""


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a stored tensor: `items` entries for every `each` outputs or inputs of the weight.

    `together`: so many are dequantized as a unit, even where entries could be split.
    """

    of: Literal["outputs", "inputs"]
    each: int = 1
    items: int = 1
    together: int = 1

    @property
    def step(self) -> int:
        return math.lcm(self.each // math.gcd(self.each, self.items), self.together)

    def size(self, total: int) -> int:
        """Its length for `total` outputs or inputs; the last entry may be for fewer."""
        return -(-total * self.items // self.each)

    def cut(self, part: slice) -> slice:
        return slice(part.start * self.items // self.each, self.size(part.stop))


@dataclass(frozen=True, slots=True)
class WeightField:
    """One tensor of a quantized weight."""

    suffix: str  # its name in the checkpoint after that of the linear
    # Its axes; an integer is a length that slicing does not change, `ANY` any length.
    axes: tuple[Axis | int, ...]
    dtypes: tuple[torch.dtype, ...]  # allowed dtypes

    def shape(self, outputs: int, inputs: int) -> tuple[int, ...]:
        totals = {"outputs": outputs, "inputs": inputs}
        return tuple(
            axis if isinstance(axis, int) else axis.size(totals[axis.of]) for axis in self.axes
        )

    def cut(self, tensor: Tensor, part: WeightSlice) -> Tensor:
        """The part of the whole tensor for a slice returned by `aligned`."""
        for dim, axis in enumerate(self.axes):
            if not isinstance(axis, int):
                along = axis.cut(part.outputs if axis.of == "outputs" else part.inputs)
                tensor = tensor.narrow(dim, along.start, along.stop - along.start)
        return tensor


WeightFields = tuple[WeightField, ...]
"""The tensors of a weight, the largest last: the others are copied until it is loaded."""


@dataclass(frozen=True, slots=True)
class WeightSlice:
    """A range of outputs and of inputs of a whole weight."""

    outputs: slice
    inputs: slice

    def aligned(self, fields: WeightFields, outputs: int, inputs: int) -> WeightSlice:
        """The smallest slice around this one to which all fields can be cut."""
        return WeightSlice(
            _widened(self.outputs, _step(fields, "outputs"), outputs),
            _widened(self.inputs, _step(fields, "inputs"), inputs),
        )

    def within(self, wider: WeightSlice) -> tuple[slice, slice]:
        return (
            slice(
                self.outputs.start - wider.outputs.start, self.outputs.stop - wider.outputs.start
            ),
            slice(self.inputs.start - wider.inputs.start, self.inputs.stop - wider.inputs.start),
        )


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """Int8 weights with a scale for each output."""

    steps: Tensor  # (O, I) int8
    scales: Tensor  # (O,) float32

    def __len__(self) -> int:
        return len(self.steps)

    def dequantize(self) -> Tensor:
        return self.steps * self.scales[:, None]


LoadedWeight = torch.Tensor | Int8Weight
"""A weight that can be multiplied: (O, I) float32, or int8 where that is exact."""


class StorageLayout(Protocol):
    def fields(self, outputs: int, inputs: int) -> WeightFields:
        """The tensors of a weight (O, I).

        Raises:
            ValueError: This shape is not supported; the message continues the linear's name.
        """
        ...

    def dequantize(self, stored: Mapping[str, Tensor], outputs: int, inputs: int) -> LoadedWeight:
        """Dequantize a weight from its tensors, by suffix, all cut to the same slice.

        outputs and inputs are those of the slice.
        """
        ...


def dequantized(whole: LoadedWeight) -> Tensor:
    return whole.dequantize() if isinstance(whole, Int8Weight) else whole


def concat_weights(pieces: Sequence[LoadedWeight]) -> LoadedWeight:
    if len(pieces) == 1:
        return pieces[0]
    steps = [piece for piece in pieces if isinstance(piece, Int8Weight)]
    if not steps:
        return torch.cat([dequantized(piece) for piece in pieces])
    together = torch.cat([piece.steps for piece in steps])
    return Int8Weight(together, torch.cat([piece.scales for piece in steps]))


def slice_weight(whole: LoadedWeight, rows: slice, columns: slice) -> LoadedWeight:
    if isinstance(whole, Int8Weight):
        return Int8Weight(whole.steps[rows, columns], whole.scales[rows])
    return whole[rows, columns]


def groups(inputs: int, each: int) -> Axis | int:
    """The axis of values shared by groups of inputs; a group of 0 is all of them."""
    return Axis("inputs", each) if each and each < inputs else 1


def check_divisible(count: int, each: int, what: str) -> None:
    """Check that groups are whole; a group of 0 is all.

    Raises:
        ValueError: They are not.
    """
    if each and count % each:
        raise ValueError(f"{count} {what} are not divisible by the group size {each}")


def _step(fields: WeightFields, of: Literal["outputs", "inputs"]) -> int:
    axes = (axis for field in fields for axis in field.axes if not isinstance(axis, int))
    return math.lcm(*(axis.step for axis in axes if axis.of == of))


def _widened(part: slice, step: int, total: int) -> slice:
    return slice(part.start // step * step, min(-(-part.stop // step) * step, total))
