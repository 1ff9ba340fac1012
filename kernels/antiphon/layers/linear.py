"""Linear layers: their sharding over ranks, apart from their weight format (`methods`).

Axes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from antiphon.layers.methods import (
    Fp8Weights,
    GroupedCodeWeights,
    LinearMethod,
    LinearShape,
    LinearWeights,
    OpWeights,
    RankSlice,
    TiledWeights,
)
from antiphon.layers.quantization.storage import (
    Fp8Weight,
    GroupedWeight,
    Int8Weight,
    LoadedWeight,
    StorageLayout,
    WeightField,
    WeightFields,
    WeightSlice,
    concat_weights,
    slice_weight,
)
from antiphon.layers.weights import BuildContext, Module, WeightSource, replicated_source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from antiphon.kernels.cpu.linear import CompiledLinear
    from antiphon.layers.context import ForwardContext


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointLayout:
    """The layout of a linear in its checkpoint's tensor, if not the whole tensor unchanged."""

    # The outputs of the tensor are runs of this length, and the linear has the same part of each;
    # None: all outputs are the linear's.
    run: int | None = None
    first: int = 0  # offset of the part in a run
    runs: int = 1  # number of runs
    transposed: bool = False  # whether the tensor is (inputs, outputs)
    # Elements of each head with interleaved RoPE; they are permuted to the layout of halves that
    # RoPE has here.
    interleaved_size: int = 0
    head_size: int = 0  # of those heads

    def shape(self, field: str, outputs: int, inputs: int) -> tuple[int, ...]:
        outputs = outputs if self.run is None else self.runs * self.run
        if field == "bias":
            return (outputs,)
        return (inputs, outputs) if self.transposed else (outputs, inputs)

    def extract(self, field: str, outputs: int, tensor: Tensor) -> Tensor:
        """The linear's own `weight` (O, I) or `bias` (O,) from the checkpoint's tensor."""
        if self.transposed and field == "weight":
            tensor = tensor.T
        if self.run is not None:
            part = slice(self.first, self.first + outputs // self.runs)
            runs = tensor.reshape(self.runs, self.run, *tensor.shape[1:])
            tensor = runs[:, part].flatten(0, 1)
        if self.interleaved_size:
            tensor = self._in_halves(tensor)
        return tensor

    def _in_halves(self, tensor: Tensor) -> Tensor:
        heads = tensor.reshape(-1, self.head_size, *tensor.shape[1:])
        turned = heads[:, : self.interleaved_size]
        turned = torch.cat((turned[:, ::2], turned[:, 1::2]), dim=1)
        return torch.cat((turned, heads[:, self.interleaved_size :]), dim=1).flatten(0, 1)


WHOLE_TENSOR = CheckpointLayout()
PIECE_NUMBERS = 1 << 20
"""Approximate number of weights that are dequantized at once: they are float32 meanwhile."""


@dataclass(frozen=True, slots=True)
class LinearPart:
    """One of the checkpoint's linears inside a fused one."""

    name: str  # of the checkpoint's linear
    outputs: int  # of the whole linear
    # Number of equal shards; if fewer than ranks, adjacent ranks have copies of a shard, as with
    # fewer key-value heads than ranks.
    shards: int
    stored: CheckpointLayout = WHOLE_TENSOR  # its layout in the tensor of that name
    biased: bool = True  # whether it has a bias where the fused one has; else its part is zero

    def piece(self) -> int:
        return self.outputs // self.shards

    def start(self, rank: int, ranks: int) -> int:
        return rank * self.shards // ranks * self.piece()


def weight_sources(
    part: LinearPart,
    inputs: int,
    cut: RankSlice,
    build: BuildContext,
    weights: LinearWeights | OpWeights,
) -> Iterator[WeightSource]:
    """The checkpoint tensors of a linear's weight, in whatever layout it is stored.

    Raises:
        ValueError: A weight of that shape cannot be stored in that layout.
    """
    if (storage := build.storage(part.name)) is None:
        yield _source("weight", part, inputs, cut, weights)
    else:
        yield from _quantized_sources(part, inputs, cut, storage, weights)


def _source(
    field: str,
    part: LinearPart,
    inputs: int,
    cut: RankSlice,
    weights: LinearWeights | OpWeights,
) -> WeightSource:
    def load(tensor: Tensor) -> None:
        weights.load(field, part.stored.extract(field, part.outputs, tensor), cut)

    shape = part.stored.shape(field, part.outputs, inputs)
    rows = cut.outputs if part.stored == WHOLE_TENSOR else None
    return WeightSource(f"{part.name}.{field}", shape, load, rows=rows)


def _quantized_sources(
    part: LinearPart,
    inputs: int,
    cut: RankSlice,
    storage: StorageLayout,
    weights: LinearWeights | OpWeights,
) -> Iterator[WeightSource]:
    stored = part.stored
    if stored.transposed:
        raise ValueError(f"{part.name}: weights stored as (inputs, outputs) are not quantized")

    def take(row: int, piece: LoadedWeight) -> None:
        weights.load("weight", piece, RankSlice(slice(None), slice(None), cut.into + row))

    pieces: list[LoadedWeight] = []

    def take_all(row: int, piece: LoadedWeight) -> None:
        pieces.append(piece)
        if row + len(piece) == outputs:
            own = _picked(stored, part.outputs, concat_weights(pieces))
            pieces.clear()
            weights.load("weight", own, cut)

    outputs, _ = stored.shape("weight", part.outputs, inputs)
    shape = (outputs, inputs)
    if stored == WHOLE_TENSOR:
        own = WeightSlice(_bounds(cut.outputs, outputs), _bounds(cut.inputs, inputs))
        yield from quantized_sources(part.name, storage, shape, own, take)
    else:
        everything = WeightSlice(slice(0, outputs), slice(0, inputs))
        yield from quantized_sources(part.name, storage, shape, everything, take_all)


def _picked(stored: CheckpointLayout, outputs: int, weight: LoadedWeight) -> LoadedWeight:
    if isinstance(weight, GroupedWeight | Fp8Weight):
        return weight.map(lambda tensor: stored.extract("weight", outputs, tensor))
    if isinstance(weight, Int8Weight):
        scales = stored.extract("bias", outputs, weight.scales)
        return Int8Weight(stored.extract("weight", outputs, weight.steps), scales)
    return stored.extract("weight", outputs, weight)


def _bounds(part: slice, total: int) -> slice:
    start, stop, _ = part.indices(total)
    return slice(start, stop)


def quantized_sources(
    name: str,
    storage: StorageLayout,
    shape: tuple[int, int],
    part: WeightSlice,
    take: Callable[[int, LoadedWeight], None],
) -> Iterator[WeightSource]:
    """The tensors of a quantized weight; when the last is loaded, the rank's slice is dequantized.

    The result is the same slice of the whole weight however it is sharded: where a slice divides
    elements that share a scale or a word, more is dequantized than is used.

    Args:
        name: Of the linear.
        storage: The layout of its weight.
        shape: Outputs and inputs of the whole weight.
        part: The slice of this rank.
        take: Called with a row of the slice, and the weights from that row on.

    Raises:
        ValueError: A weight of that shape cannot have that layout; names the linear.
    """
    try:
        fields = storage.fields(*shape)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    gathering = _WeightAssembler(name, storage, fields, shape, part, take)
    wider = part.aligned(fields, *shape)
    for one in fields:
        yield WeightSource(
            name + one.suffix,
            one.shape(*shape),
            lambda tensor, one=one: gathering.add(one, tensor),
            one.dtypes,
            rows=one.rows(wider),
        )


@dataclass(slots=True)
class _WeightAssembler:
    name: str
    storage: StorageLayout
    fields: WeightFields
    shape: tuple[int, int]
    part: WeightSlice
    take: Callable[[int, LoadedWeight], None]
    received: dict[str, Tensor] = field(default_factory=dict[str, "Tensor"])

    def add(self, one: WeightField, tensor: Tensor) -> None:
        """Keep a tensor until the last one is loaded; that one is used without a copy."""
        last = len(self.received) + 1 == len(self.fields)
        self.received[one.suffix] = tensor if last else tensor.clone()
        if last:
            self._place()
            self.received.clear()

    def _place(self) -> None:
        outputs, columns = self.part.outputs, self.part.inputs
        rows = max(PIECE_NUMBERS // self.shape[1], 1)
        # Chunks do not split what shares a scale: that would be dequantized twice.
        whole = WeightSlice(slice(0, rows), columns).aligned(self.fields, *self.shape)
        rows = max(whole.outputs.stop, 1)
        for start in range(outputs.start, outputs.stop, rows):
            piece = WeightSlice(slice(start, min(start + rows, outputs.stop)), columns)
            self.take(start - outputs.start, self._whole(piece))

    def _whole(self, piece: WeightSlice) -> LoadedWeight:
        wider = piece.aligned(self.fields, *self.shape)
        stored = {one.suffix: one.cut(self.received[one.suffix], wider) for one in self.fields}
        outputs = wider.outputs.stop - wider.outputs.start
        inputs = wider.inputs.stop - wider.inputs.start
        try:
            whole = self.storage.dequantize(stored, outputs, inputs)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from error
        return slice_weight(whole, *piece.within(wider))


def kernels_of(weights: LinearWeights | OpWeights) -> frozenset[str]:
    """The ops that multiply by these weights."""
    if isinstance(weights, Fp8Weights):
        return frozenset({"linear.fp8"})
    if isinstance(weights, GroupedCodeWeights):
        return frozenset({"linear.int8" if weights.rounding else "linear.grouped"})
    return frozenset({"linear.tiled"}) if isinstance(weights, TiledWeights) else frozenset[str]()


def multiply(ctx: ForwardContext, weights: LinearWeights | OpWeights, x: Tensor) -> Tensor:
    """Multiply: x (T, I)  ->  (T, O), bias added."""
    if isinstance(weights, Fp8Weights):
        return ctx.ops.linear_fp8(x, weights.matrix)
    if isinstance(weights, GroupedCodeWeights):
        if weights.rounding:
            return ctx.ops.linear_int8(x, weights.matrix)
        return ctx.ops.linear_grouped(x, weights.matrix)
    if isinstance(weights, TiledWeights):
        return ctx.ops.linear_tiled(x, weights.table, weights.bias)
    return weights.apply(x)


class ColumnLinear(Module):
    """A column-parallel linear: outputs are sharded over ranks; may fuse linears of one input.

    `halves`: the parts are a gate and an up projection.
    """

    def __init__(
        self,
        name: str,
        inputs: int,
        parts: tuple[LinearPart, ...],
        *,
        bias: bool,
        build: BuildContext,
        method: LinearMethod,
        halves: bool = False,
    ) -> None:
        for part in parts:
            if part.outputs % part.shards or build.tp.ranks % part.shards:
                raise ValueError(
                    f"{part.name}: {part.shards} shards do not fit {build.tp.ranks} ranks"
                )
        self.name = name
        self._inputs, self._parts, self._bias, self._build = inputs, parts, bias, build
        shape = LinearShape(inputs, sum(part.piece() for part in parts), bias, halves)
        self._weights = build.create_linear([part.name for part in parts], shape, method, inputs)
        self.kernels = kernels_of(self._weights)
        into = 0
        for part in parts:
            if bias and not part.biased:
                cut = RankSlice(slice(None), slice(None), into)
                self._weights.load("bias", torch.zeros(part.piece()), cut)
            into += part.piece()

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """Multiply: x (T, I)  ->  (T, O / ranks), the parts concatenated."""
        return multiply(ctx, self._weights, x)

    @property
    def packed(self) -> CompiledLinear | None:
        return self._weights.packed

    def sources(self) -> Iterator[WeightSource]:
        tp, into = self._build.tp, 0
        for part in self._parts:
            start = part.start(tp.rank, tp.ranks)
            cut = RankSlice(slice(start, start + part.piece()), slice(None), into)
            yield from weight_sources(part, self._inputs, cut, self._build, self._weights)
            if self._bias and part.biased:
                yield _source("bias", part, self._inputs, cut, self._weights)
            into += part.piece()


class RowLinear(Module):
    """A row-parallel linear: inputs are sharded over ranks, outputs summed, then the bias added.

    On a single rank there is no sum, and the bias is part of the multiplication.
    """

    def __init__(
        self,
        name: str,
        inputs: int,
        outputs: int,
        *,
        bias: bool,
        build: BuildContext,
        method: LinearMethod,
        stored: CheckpointLayout = WHOLE_TENSOR,
    ) -> None:
        self.name = name
        self._inputs, self._build = inputs, build
        self._part = LinearPart(name, outputs, shards=1, stored=stored)
        share, rank = build.share(inputs, name), build.tp.rank
        self._cut = RankSlice(slice(None), slice(rank * share, (rank + 1) * share), into=0)
        self._bias_within = bias and build.tp.ranks == 1
        shape = LinearShape(share, outputs, self._bias_within)
        self._weights = build.create_linear((name,), shape, method, inputs)
        self.kernels = kernels_of(self._weights)
        self._bias = build.empty(outputs) if bias and not self._bias_within else None

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """Multiply: x (T, I / ranks)  ->  (T, O), the same on every rank."""
        total = ctx.tp.all_reduce(multiply(ctx, self._weights, x))
        return total if self._bias is None else total + self._bias

    @property
    def packed(self) -> CompiledLinear | None:
        return self._weights.packed if self._build.tp.ranks == 1 else None

    def sources(self) -> Iterator[WeightSource]:
        yield from weight_sources(self._part, self._inputs, self._cut, self._build, self._weights)
        if self._bias_within:
            yield _source("bias", self._part, self._inputs, self._cut, self._weights)
        if self._bias is not None:
            yield from replicated_source(f"{self.name}.bias", self._bias)


def replicated(
    name: str, inputs: int, outputs: int, *, bias: bool, build: BuildContext, method: LinearMethod
) -> ColumnLinear:
    """A linear that is whole on every rank: a small one, whose sharding would need a collective."""
    part = LinearPart(name, outputs, shards=1)
    return ColumnLinear(name, inputs, (part,), bias=bias, build=build, method=method)
