"""Weight formats of linears in memory.

Layers define the sharding over ranks, a `LinearMethod` the representation. Axes: T tokens,
I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 (its name in every torch program)

from antiphon.kernels.cpu import extension
from antiphon.kernels.cpu.linear import (
    DTYPE_NAMES,
    CompiledLinear,
    Format,
    Grouping,
    PackedGroups,
    PackedWeight,
)
from antiphon.kernels.linear_fp8 import E4M3, Fp8Matrix
from antiphon.kernels.linear_grouped import GroupedCodes, GroupedMatrix, packed
from antiphon.layers.quantization.storage import (
    Fp8Weight,
    GroupedWeight,
    Int8Weight,
    LoadedWeight,
    dequantized,
    slice_weight,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LinearShape:
    """One rank's linear; with `halves`, its outputs are a gate and an up projection, as wide."""

    inputs: int
    outputs: int
    bias: bool
    halves: bool = False


@dataclass(frozen=True, slots=True)
class RankSlice:
    """A slice of a checkpoint tensor and its target on this rank."""

    outputs: slice  # rows of the whole tensor that this rank has
    inputs: slice  # columns of it; a bias has none
    into: int  # first row of this rank's weight that they fill

    def of(self, field: str, tensor: LoadedWeight) -> LoadedWeight:
        if field == "weight":
            return slice_weight(tensor, self.outputs, self.inputs)
        return dequantized(tensor)[self.outputs]


WHOLE_SLICE = RankSlice(slice(None), slice(None), into=0)


class PlainWeights:
    """The weight of a linear as a tensor, `table` (O, I), multiplied by torch."""

    packed: CompiledLinear | None = None

    def __init__(self, table: Tensor, bias: Tensor | None) -> None:
        self.table = table
        self._bias = bias

    @classmethod
    def empty(cls, shape: LinearShape, dtype: torch.dtype, device: torch.device) -> PlainWeights:
        table = torch.empty((shape.outputs, shape.inputs), dtype=dtype, device=device)
        bias = torch.empty(shape.outputs, dtype=dtype, device=device) if shape.bias else None
        return cls(table, bias)

    def load(self, field: str, tensor: LoadedWeight, cut: RankSlice) -> None:
        """Load a slice of the checkpoint's `weight` or `bias`."""
        into = self.table if field == "weight" else self._bias
        assert into is not None, "a linear without bias"
        part = dequantized(cut.of(field, tensor))
        into[cut.into : cut.into + len(part)].copy_(part)

    def apply(self, x: Tensor) -> Tensor:
        """Multiply: x (T, I)  ->  (T, O), bias added."""
        return F.linear(x, self.table, self._bias)

    def apply_wide(self, x: Tensor) -> Tensor:
        """Multiply: x (T, I)  ->  (T, O) float32, here rounded to the weights' dtype before."""
        return self.apply(x).float()

    def rows(self, outputs: Tensor) -> Tensor:
        """Look up the weights of outputs (N,) int64  ->  (N, I)."""
        return F.embedding(outputs, self.table)


class TiledWeights(PlainWeights):
    """As `PlainWeights`, for layers that call the op `linear.tiled`."""

    @property
    def bias(self) -> Tensor | None:
        return self._bias

    def apply(self, x: Tensor) -> Tensor:
        raise AssertionError("a layer calls the op")


class PackedWeights:
    """Weights packed for the CPU kernels while they are loaded, so that there is no second copy.

    As `PlainWeights`, but for sums in float32 that are not rounded.
    """

    table: Tensor | None = None

    def __init__(self, shape: LinearShape, dtype: torch.dtype, format_: Format) -> None:
        self._quantized = format_ != "packed"
        self._panels = PackedWeight(
            shape.inputs,
            shape.outputs,
            bias=shape.bias,
            dtype=dtype,
            format_=format_,
            halves=shape.halves,
        )
        self.packed = linear = self._panels.linear
        self.apply, self.apply_wide, self.rows = linear.multiply, linear.multiply_wide, linear.rows

    def load(self, field: str, tensor: LoadedWeight, cut: RankSlice) -> None:
        part = cut.of(field, tensor)
        if field != "weight":
            self._panels.write_bias(cut.into, dequantized(part))
        elif isinstance(part, Int8Weight) and self._quantized:
            self._panels.write_int8(cut.into, part.steps, part.scales)
        else:
            self._panels.write(cut.into, dequantized(part))


class GroupedWeights:
    """As `PackedWeights`, for weights that are stored in groups, and stay so."""

    table: Tensor | None = None

    def __init__(self, shape: LinearShape, dtype: torch.dtype, grouping: Grouping) -> None:
        self._grouping = grouping
        self._panels = PackedGroups(
            shape.inputs,
            shape.outputs,
            grouping.multiplied_in(dtype),
            bias=shape.bias,
            dtype=dtype,
            halves=shape.halves,
        )
        self.packed = linear = self._panels.linear
        self.apply, self.apply_wide, self.rows = linear.multiply, linear.multiply_wide, linear.rows

    def load(self, field: str, tensor: LoadedWeight, cut: RankSlice) -> None:
        part = cut.of(field, tensor)
        if field != "weight":
            self._panels.write_bias(cut.into, dequantized(part))
            return
        assert isinstance(part, GroupedWeight), "a layout that has groups"
        part = part.regrouped(self._grouping)
        self._panels.write(cut.into, part.codes, part.scales, part.lowest)


class Fp8Weights:
    """Weights that are stored in fp8, and stay so: the op `linear.fp8` multiplies `matrix`."""

    packed: CompiledLinear | None = None

    def __init__(self, matrix: Fp8Matrix) -> None:
        self.matrix = matrix

    def load(self, field: str, tensor: LoadedWeight, cut: RankSlice) -> None:
        part, matrix = cut.of(field, tensor), self.matrix
        rows = slice(cut.into, cut.into + len(part))
        if field != "weight":
            assert matrix.bias is not None, "a linear without bias"
            matrix.bias[rows].copy_(dequantized(part))
            return
        assert isinstance(part, Fp8Weight), "a layout of fp8, not cut within a group"
        matrix.codes[rows].copy_(part.codes)
        matrix.scales[:, rows].copy_(part.scales.T)


class GroupedCodeWeights:
    """Weights that are stored in groups, and stay so: the op `linear.grouped` has `matrix`.

    `rounding`: the op `linear.int8` has it, which rounds activations.
    """

    packed: CompiledLinear | None = None

    def __init__(self, matrix: GroupedMatrix, grouping: Grouping, *, rounding: bool) -> None:
        self.matrix, self.rounding = matrix, rounding
        self._grouping = grouping

    def load(self, field: str, tensor: LoadedWeight, cut: RankSlice) -> None:
        part, matrix = cut.of(field, tensor), self.matrix
        rows = slice(cut.into, cut.into + len(part))
        if field != "weight":
            assert matrix.bias is not None, "a linear without bias"
            matrix.bias[rows].copy_(dequantized(part))
            return
        if isinstance(part, Int8Weight):
            matrix.codes[rows].copy_(part.steps)
            matrix.scales[0, rows].copy_(part.scales)
            return
        assert isinstance(part, GroupedWeight), "a layout that has groups"
        part = part.regrouped(self._grouping)
        if matrix.codes.dtype is torch.int8:
            matrix.codes[rows].copy_(part.values())
        else:
            matrix.codes[rows].copy_(packed(part.codes))
        scales = part.scales
        if matrix.tensor_scales is not None:
            assert part.tensor_scales is not None, "a grouping with scales of tensors"
            matrix.tensor_scales[rows].copy_(part.tensor_scales[:, 0])
            scales = scales / part.tensor_scales  # rounded to what was stored, by the copy
        matrix.scales[:, rows].copy_(scales.T)
        if matrix.minimums is not None:
            assert part.lowest is not None, "a grouping with minimums"
            matrix.minimums[:, rows].copy_(part.lowest.T)


@dataclass(frozen=True, slots=True)
class Fp8Codes:
    """Weights stay in fp8; `group` inputs share a scale."""

    group: int

    def empty(
        self, shape: LinearShape, dtype: torch.dtype, device: torch.device, *experts: int
    ) -> Fp8Matrix:
        """Memory of a matrix, or of as many as there are experts."""
        groups = -(-shape.inputs // self.group)
        bias = (*experts, shape.outputs)
        return Fp8Matrix(
            torch.empty((*experts, shape.outputs, shape.inputs), dtype=E4M3, device=device),
            torch.empty((*experts, groups, shape.outputs), dtype=torch.float32, device=device),
            self.group,
            torch.empty(bias, dtype=dtype, device=device) if shape.bias else None,
        )

    def weights(self, matrix: Fp8Matrix | GroupedMatrix) -> Fp8Weights:
        assert isinstance(matrix, Fp8Matrix), "memory that `empty` has made"
        return Fp8Weights(matrix)


@dataclass(frozen=True, slots=True)
class CodesInGroups:
    """Weights stay in groups; `rounding`: a linear rounds activations to int8, as weights are."""

    grouping: Grouping
    codes: GroupedCodes
    rounding: bool = False

    def empty(
        self, shape: LinearShape, dtype: torch.dtype, device: torch.device, *experts: int
    ) -> GroupedMatrix:
        """Memory of a matrix, or of as many as there are experts."""
        outputs, groups = shape.outputs, -(-shape.inputs // self.grouping.group)
        # One scale an output is little to read.
        kept = torch.float32 if groups == 1 else self.grouping.multiplied_in(dtype).scales
        if factored := self.grouping.scales is E4M3:
            kept = E4M3
        scales = torch.empty((*experts, groups, outputs), dtype=kept, device=device)
        bias = (*experts, outputs)
        return GroupedMatrix(
            self.codes.empty(*experts, outputs, shape.inputs, device=device),
            scales,
            torch.empty_like(scales) if self.grouping.minimums else None,
            self.grouping.group,
            self.codes.first,
            torch.empty(bias, dtype=dtype, device=device) if shape.bias else None,
            torch.empty(bias, dtype=torch.float32, device=device) if factored else None,
        )

    def weights(self, matrix: Fp8Matrix | GroupedMatrix) -> GroupedCodeWeights:
        assert isinstance(matrix, GroupedMatrix), "memory that `empty` has made"
        return GroupedCodeWeights(matrix, self.grouping, rounding=self.rounding)


LinearWeights = PlainWeights | PackedWeights | GroupedWeights
OpWeights = Fp8Weights | GroupedCodeWeights
"""Weights that an op multiplies, which a layer calls for them."""
OpCodes = Fp8Codes | CodesInGroups
"""How they are kept."""


class LinearMethod(StrEnum):
    """How the weights of a linear are stored in memory and multiplied; the names of `model.linear`.

    `plain` is torch's matmul, all others are packed for the CPU kernels; `grouped` keeps the codes
    and scales of weights that are stored in groups, and packs others; on a GPU, where a layer calls
    the op for them, for `int8` and for `int8_dynamic`, others are dequantized. `fp8` keeps weights
    that are stored in fp8 for a GPU, where a layer calls the op for them, and dequantizes others.
    `tiled` is `plain` with an op of a GPU that is batch-invariant.
    """

    PLAIN = "plain"
    PACKED = "packed"
    INT8 = "int8"
    INT8_DYNAMIC = "int8_dynamic"
    GROUPED = "grouped"
    FP8 = "fp8"
    TILED = "tiled"

    @property
    def invariant(self) -> bool:
        """Whether multiplication is batch-invariant: a row's bits depend on that row alone."""
        # Measured: in float32, the bits of torch's depend on the number of rows: 1, 2 and 3, or 4
        # and more. In the kernels the sum of an output runs in one order.
        return self not in (LinearMethod.PLAIN, LinearMethod.FP8)

    def create(
        self,
        shape: LinearShape,
        dtype: torch.dtype,
        device: torch.device,
        grouping: Grouping | None = None,
    ) -> LinearWeights:
        """Make the memory of a linear; `grouping` is that of its weights, if they have one."""
        if self in (LinearMethod.PLAIN, LinearMethod.FP8):
            return PlainWeights.empty(shape, dtype, device)
        if self is LinearMethod.TILED:
            return TiledWeights.empty(shape, dtype, device)
        if self is not LinearMethod.GROUPED:
            return PackedWeights(shape, dtype, self.value)
        if grouping is None or not grouping.fits(shape.inputs):
            return PackedWeights(shape, dtype, LinearMethod.PACKED.value)
        return GroupedWeights(shape, dtype, grouping)

    def for_table(self) -> LinearMethod:
        """The method of an embedding table that is multiplied, too."""
        # Activations are not quantized when computing logits: only the table is.
        return LinearMethod.INT8 if self is LinearMethod.INT8_DYNAMIC else self

    def exact(self) -> LinearMethod:
        """The unquantized method that multiplies like this one."""
        if self is LinearMethod.TILED:
            return self
        return LinearMethod.PACKED if self.invariant else LinearMethod.PLAIN


ON_DEVICE = (LinearMethod.GROUPED, LinearMethod.INT8, LinearMethod.INT8_DYNAMIC)
"""Methods of a CPU by which a GPU keeps quantized weights, too, for the ops `linear.grouped` and
`linear.int8`."""


def unsupported_reason(
    method: LinearMethod, device: torch.device, dtype: torch.dtype
) -> str | None:
    if method in (LinearMethod.PLAIN, LinearMethod.FP8, LinearMethod.TILED):
        return None  # of fp8, and of tiles, the op says what it needs
    if device.type != "cpu" and method in ON_DEVICE:
        return None  # likewise
    if device.type != "cpu":
        return "it runs on the CPU only"
    if dtype not in DTYPE_NAMES:
        return f"the CPU's own kernels do not compute in {str(dtype).removeprefix('torch.')}"
    return extension.unavailable_reason()
