"""The interface of storage layouts: the tensors of a quantized weight, and their dequantization.

Axes: O outputs, I inputs, G groups of inputs that share a scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from antiphon.kernels.cpu.linear import CODE_UNITS, INT8_MAX, Grouping

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

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

    def rows(self, part: WeightSlice) -> slice | None:
        """What `cut` leaves of the first axis for such a slice; None: all of it."""
        axis = self.axes[0]
        if isinstance(axis, int):
            return None
        return axis.cut(part.outputs if axis.of == "outputs" else part.inputs)

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


FOUR_BITS = tuple(float(code - 8) for code in range(16))
"""Values of codes that stand for numbers from -8 to 7."""
SIX_BITS = tuple(float(code - 32) for code in range(64))
"""The same, from -32 to 31."""


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """Codes with scales of groups: (value - zero) * scale, or value * scale + minimum."""

    grouping: Grouping
    codes: Tensor  # (O, I) uint8; of 8 bits, the bytes of signed numbers
    scales: Tensor  # (O, G) float32
    zeros: Tensor | None = None  # (O, G) float32, in the unit of values
    minimums: Tensor | None = None  # (O, G) float32
    # (O, 1) float32: factors of scales, which are numbers of e4m3 without them.
    tensor_scales: Tensor | None = None

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def lowest(self) -> Tensor | None:
        """What is added to value * scale, (O, G) float32."""
        return self.minimums if self.zeros is None else -self.zeros * self.scales

    def values(self) -> Tensor:
        """The value of each code, (O, I) float32."""
        if not self.grouping.values:
            return self.codes.contiguous().view(torch.int8).float()
        return lookup(self.codes, torch.tensor(self.grouping.values))

    def dequantize(self) -> Tensor:
        outputs, inputs = self.codes.shape
        values, group = self.values(), self.grouping.group
        # The last group may be shorter.
        apart = torch.nn.functional.pad(values, (0, -inputs % group)).view(outputs, -1, group)
        if self.zeros is not None:
            apart.sub_(self.zeros[..., None])
        if self.minimums is None:
            apart.mul_(self.scales[..., None])
        else:  # rounded once, as by those who define these formats
            wide = apart.double() * self.scales[..., None].double()
            apart = wide.add_(self.minimums[..., None]).float()
        return apart.view(outputs, -1)[:, :inputs]

    def slice(self, rows: slice, columns: slice) -> LoadedWeight:
        """A part of it; numbers, where columns divide a group."""
        inputs, group = self.codes.shape[1], self.grouping.group
        start, stop, _ = columns.indices(inputs)
        if start % group or (stop % group and stop != inputs):
            part = replace(self, **{name: one[rows] for name, one in self.tensors()})
            return part.dequantize()[:, columns]
        groups = slice(start // group, -(-stop // group))
        cut = {
            name: one[rows] if name == "tensor_scales" else one[rows, groups]
            for name, one in self.tensors()
            if name != "codes"
        }
        return replace(self, codes=self.codes[rows, columns], **cut)

    def map(self, change: Callable[[Tensor], Tensor]) -> GroupedWeight:
        """The same with every tensor changed alike, in its outputs."""
        return replace(self, **{name: change(one) for name, one in self.tensors()})

    def followed_by(self, others: Sequence[GroupedWeight]) -> GroupedWeight:
        """The outputs of this weight and of others in the same grouping."""
        all_ = [dict(one.tensors()) for one in (self, *others)]
        return replace(self, **{name: torch.cat([one[name] for one in all_]) for name in all_[0]})

    def regrouped(self, to: Grouping) -> GroupedWeight:
        """The same weights in another grouping, which `common_grouping` has returned."""
        if to == self.grouping:
            return self
        # Tables of values begin with the least one and have every number after it.
        first = int(to.values[0]) if to.values else 0
        codes = (self.values() - first).to(torch.int8).view(torch.uint8)
        inputs, own = self.codes.shape[1], self.grouping.group

        def spread(numbers: Tensor) -> Tensor:
            return numbers.repeat_interleave(own // to.group, 1)[:, : -(-inputs // to.group)]

        scales, least = spread(self.scales), self.lowest
        if to.minimums:
            least = torch.zeros_like(scales) if least is None else spread(least)
        return GroupedWeight(to, codes, scales, minimums=least)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Those that it has, by name."""
        for name in ("codes", "scales", "zeros", "minimums", "tensor_scales"):
            if (one := getattr(self, name)) is not None:
                yield name, one


def common_grouping(groupings: Iterable[Grouping]) -> Grouping | None:
    """One grouping for weights that are multiplied together; None: there is none.

    Where they differ, the values of codes are stored as numbers of 6 bits, or of 8.
    """
    different = set(groupings)
    if len(different) == 1:
        return different.pop()
    values = [value for one in different for value in one.values]
    if any(value != int(value) or abs(value) > INT8_MAX for value in values):
        return None
    dtypes = {one.scales for one in different}
    group = math.gcd(*(one.group for one in different))
    # Codes of 8 bits have no table of values: they have more of them.
    tables = all(one.values for one in different)
    narrow = tables and set(values) <= set(SIX_BITS) and group % CODE_UNITS[6] == 0
    return Grouping(
        bits=6 if narrow else 8,
        group=group,
        scales=dtypes.pop() if len(dtypes) == 1 else torch.float32,
        minimums=any(one.minimums for one in different),
        values=SIX_BITS if narrow else (),
    )


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """Weights in e4m3 with a scale for each output and group of inputs."""

    codes: Tensor  # (O, I) float8_e4m3fn
    scales: Tensor  # (O, G) float32
    group: int  # inputs of a group; the last group may have fewer

    def __len__(self) -> int:
        return len(self.codes)

    def dequantize(self) -> Tensor:
        scales, inputs = self.scales, self.codes.shape[1]
        if scales.shape[1] > 1:
            scales = scales.repeat_interleave(self.group, 1)[:, :inputs]
        return self.codes.float().mul_(scales)

    def slice(self, rows: slice, columns: slice) -> LoadedWeight:
        """A part of it; numbers, where columns divide a group."""
        codes, scales = self.codes[rows], self.scales[rows]
        if scales.shape[1] > 1:
            start, stop, _ = columns.indices(codes.shape[1])
            if start % self.group or (stop % self.group and stop != codes.shape[1]):
                return Fp8Weight(codes, scales, self.group).dequantize()[:, columns]
            scales = scales[:, start // self.group : -(-stop // self.group)]
        return Fp8Weight(codes[:, columns], scales, self.group)

    def map(self, change: Callable[[Tensor], Tensor]) -> Fp8Weight:
        """The same with both tensors changed alike, in their outputs."""
        return Fp8Weight(change(self.codes), change(self.scales), self.group)

    def followed_by(self, others: Sequence[Fp8Weight]) -> Fp8Weight:
        """The outputs of this weight and of others with the same groups."""
        codes = torch.cat([self.codes, *(one.codes for one in others)])
        return Fp8Weight(
            codes, torch.cat([self.scales, *(one.scales for one in others)]), self.group
        )


LoadedWeight = torch.Tensor | Int8Weight | GroupedWeight | Fp8Weight
"""A weight that can be multiplied: (O, I) float32, in groups, or in 8 bits where that is exact."""


class StorageLayout(Protocol):
    def fields(self, outputs: int, inputs: int) -> WeightFields:
        """The tensors of a weight (O, I).

        Raises:
            ValueError: This shape is not supported; the message continues the linear's name.
        """
        ...

    def dequantize(self, stored: Mapping[str, Tensor], outputs: int, inputs: int) -> LoadedWeight:
        """Dequantize a weight from its tensors, by suffix, all cut to the same slice.

        outputs and inputs are those of the slice. In groups as `grouping` says, if it says so.
        """
        ...

    def grouping(self, inputs: int) -> Grouping | None:
        """The grouping of weights with so many inputs; None: they are not in groups."""
        ...


def dequantized(whole: LoadedWeight) -> Tensor:
    return whole if isinstance(whole, torch.Tensor) else whole.dequantize()


def concat_weights(pieces: Sequence[LoadedWeight]) -> LoadedWeight:
    if len(pieces) == 1:
        return pieces[0]
    if isinstance(first := pieces[0], GroupedWeight):
        return first.followed_by([one for one in pieces[1:] if isinstance(one, GroupedWeight)])
    if isinstance(first, Fp8Weight):
        return first.followed_by([one for one in pieces[1:] if isinstance(one, Fp8Weight)])
    steps = [piece for piece in pieces if isinstance(piece, Int8Weight)]
    if not steps:
        return torch.cat([dequantized(piece) for piece in pieces])
    together = torch.cat([piece.steps for piece in steps])
    return Int8Weight(together, torch.cat([piece.scales for piece in steps]))


def slice_weight(whole: LoadedWeight, rows: slice, columns: slice) -> LoadedWeight:
    if isinstance(whole, Int8Weight):
        return Int8Weight(whole.steps[rows, columns], whole.scales[rows])
    if isinstance(whole, GroupedWeight | Fp8Weight):
        return whole.slice(rows, columns)
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


def lookup(codes: Tensor, table: Tensor) -> Tensor:
    """The value of each code: codes (...,) uint8, table (N,)  ->  (...,)."""
    return table.to(codes.device).index_select(0, codes.flatten().int()).view(codes.shape)


def _step(fields: WeightFields, of: Literal["outputs", "inputs"]) -> int:
    axes = (axis for field in fields for axis in field.axes if not isinstance(axis, int))
    return math.lcm(*(axis.step for axis in axes if axis.of == of))


def _widened(part: slice, step: int, total: int) -> slice:
    return slice(part.start // step * step, min(-(-part.stop // step) * step, total))
