"""What a stored weight is: the tensors that hold it, and the function that makes it whole.

Axes: O outputs, I inputs, G groups of inputs that share a scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from antiphon.layers.weights import FLOATS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from antiphon.layers.methods import LinearMethod

SCALES = (*FLOATS, torch.float8_e8m0fnu)
"""Number formats of scales; the last holds powers of two only."""


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a stored tensor: `items` of it for `each` outputs or inputs of the weight.

    `together`: so many are made whole as one, whatever the items allow.
    """

    of: Literal["outputs", "inputs"]
    each: int = 1
    items: int = 1
    together: int = 1

    @property
    def step(self) -> int:
        """Parts begin at its multiples: where an item begins."""
        return math.lcm(self.each // math.gcd(self.each, self.items), self.together)

    def size(self, total: int) -> int:
        """Its length for so many outputs or inputs; the last item may be for fewer."""
        return -(-total * self.items // self.each)

    def cut(self, part: slice) -> slice:
        """The items of a part."""
        return slice(part.start * self.items // self.each, self.size(part.stop))


@dataclass(frozen=True, slots=True)
class WeightField:
    """One tensor of a stored weight.

    Attributes:
        suffix: What follows the name of the linear in the checkpoint.
        axes: Its axes; a number is a length that no cut changes, `weights.ANY` any length.
        dtypes: Number formats that it may have.
    """

    suffix: str
    axes: tuple[Axis | int, ...]
    dtypes: tuple[torch.dtype, ...]

    def shape(self, outputs: int, inputs: int) -> tuple[int, ...]:
        """Of the whole tensor, of a weight (O, I)."""
        totals = {"outputs": outputs, "inputs": inputs}
        return tuple(
            axis if isinstance(axis, int) else axis.size(totals[axis.of]) for axis in self.axes
        )

    def cut(self, tensor: Tensor, part: WeightSlice) -> Tensor:
        """What of the whole tensor belongs to a part that `aligned` gave."""
        for dim, axis in enumerate(self.axes):
            if not isinstance(axis, int):
                along = axis.cut(part.outputs if axis.of == "outputs" else part.inputs)
                tensor = tensor.narrow(dim, along.start, along.stop - along.start)
        return tensor


WeightFields = tuple[WeightField, ...]
"""The tensors of a weight, the largest last: those before it are copied until it comes."""


@dataclass(frozen=True, slots=True)
class WeightSlice:
    """Outputs and inputs of a whole weight, each from start to stop."""

    outputs: slice
    inputs: slice

    def aligned(self, fields: WeightFields, outputs: int, inputs: int) -> WeightSlice:
        """The smallest part around this one that all fields can be cut to."""
        return WeightSlice(
            _widened(self.outputs, _step(fields, "outputs"), outputs),
            _widened(self.inputs, _step(fields, "inputs"), inputs),
        )

    def within(self, wider: WeightSlice) -> tuple[slice, slice]:
        """Where this part lies in a wider one."""
        return (
            slice(
                self.outputs.start - wider.outputs.start, self.outputs.stop - wider.outputs.start
            ),
            slice(self.inputs.start - wider.inputs.start, self.inputs.stop - wider.inputs.start),
        )


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """Weights that are whole multiples of one scale an output.

    Attributes:
        steps: (O, I) int8.
        scales: (O,) float32.
    """

    steps: Tensor
    scales: Tensor

    def __len__(self) -> int:
        """Outputs."""
        return len(self.steps)

    def dequantize(self) -> Tensor:
        """The weights, (O, I) float32."""
        return self.steps * self.scales[:, None]


LoadedWeight = torch.Tensor | Int8Weight
"""A weight that can be multiplied: (O, I) float32, or as steps where it is that exactly."""


class StorageLayout(Protocol):
    """How a checkpoint stores the weight of a linear."""

    def fields(self, outputs: int, inputs: int) -> WeightFields:
        """The tensors of a weight (O, I).

        Raises:
            ValueError: It cannot be stored so; the message goes on from the linear's name.
        """
        ...

    def dequantize(self, stored: Mapping[str, Tensor], outputs: int, inputs: int) -> LoadedWeight:
        """Make the weight of its tensors, by suffix, all cut to the same part.

        outputs and inputs are those of the part.
        """
        ...


class CheckpointQuantization(Protocol):
    """Which linears of a checkpoint are stored, and how such a linear is kept."""

    @property
    def method(self) -> LinearMethod:
        """Keeps and multiplies linears all of whose parts are stored."""
        ...

    def storage(self, name: str) -> StorageLayout | None:
        """How the linear of that name in the checkpoint is stored; None: in the model's numbers."""
        ...


def dequantized(whole: LoadedWeight) -> Tensor:
    """A weight (O, I) as numbers, whichever of the two forms it has."""
    return whole.dequantize() if isinstance(whole, Int8Weight) else whole


def concat_weights(pieces: Sequence[LoadedWeight]) -> LoadedWeight:
    """Pieces of a weight, each in the same form, as one: those outputs after these."""
    if len(pieces) == 1:
        return pieces[0]
    steps = [piece for piece in pieces if isinstance(piece, Int8Weight)]
    if not steps:
        return torch.cat([dequantized(piece) for piece in pieces])
    together = torch.cat([piece.steps for piece in steps])
    return Int8Weight(together, torch.cat([piece.scales for piece in steps]))


def slice_weight(whole: LoadedWeight, rows: slice, columns: slice) -> LoadedWeight:
    """A part of a weight, in the form that it has."""
    if isinstance(whole, Int8Weight):
        return Int8Weight(whole.steps[rows, columns], whole.scales[rows])
    return whole[rows, columns]


def groups(inputs: int, each: int) -> Axis | int:
    """The axis of what groups of inputs share; a group of 0 is all of them."""
    return Axis("inputs", each) if each and each < inputs else 1


def group_of(inputs: Tensor, count: int) -> Tensor:
    """Which of `count` groups each input belongs to, (I,) int32.

    Raises:
        ValueError: One belongs to none.
    """
    if bool(((inputs < 0) | (inputs >= count)).any()):
        raise ValueError(f"inputs belong to other groups than there are, {count}")
    return inputs.int()


def check_divisible(count: int, each: int, what: str) -> None:
    """Hold that groups are whole; a group of 0 is all.

    Raises:
        ValueError: They are not.
    """
    if each and count % each:
        raise ValueError(f"{count} {what} are not whole groups of {each}")


def _step(fields: WeightFields, of: Literal["outputs", "inputs"]) -> int:
    axes = (axis for field in fields for axis in field.axes if not isinstance(axis, int))
    return math.lcm(*(axis.step for axis in axes if axis.of == of))


def _widened(part: slice, step: int, total: int) -> slice:
    return slice(part.start // step * step, min(-(-part.stop // step) * step, total))
