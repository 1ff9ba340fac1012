"""Linear layers: their sharding over ranks, apart from their weight format (`methods`).

Axes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from antiphon.layers.methods import LinearShape, RankSlice
from antiphon.layers.quantization.assemble import quantized_sources
from antiphon.layers.quantization.storage import Int8Weight, concat_weights
from antiphon.layers.quantization.storage import WeightSlice as StoredPart
from antiphon.layers.weights import BuildContext, WeightSource, replicated_source

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from antiphon.kernels.cpu.linear import CompiledLinear
    from antiphon.layers.context import ForwardContext
    from antiphon.layers.methods import LinearMethod, LinearWeights
    from antiphon.layers.quantization.storage import LoadedWeight, StorageLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointLayout:
    """The layout of a linear in its checkpoint's tensor, if not the whole tensor unchanged.

    Attributes:
        run: The outputs of the tensor are runs of this length, and the linear has the same part of
            each; None: all outputs are the linear's.
        first: Offset of the part in a run.
        runs: Number of runs.
        transposed: Whether the tensor is (inputs, outputs).
        interleaved_size: Elements of each head with interleaved RoPE; they are permuted to the
            layout of halves that RoPE has here.
        head_size: Of those heads.
    """

    run: int | None = None
    first: int = 0
    runs: int = 1
    transposed: bool = False
    interleaved_size: int = 0
    head_size: int = 0

    def shape(self, field: str, outputs: int, inputs: int) -> tuple[int, ...]:
        """The shape of the checkpoint's `weight` or `bias`."""
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


@dataclass(frozen=True, slots=True)
class LinearPart:
    """One of the checkpoint's linears inside a fused one.

    Attributes:
        name: Of the checkpoint's linear.
        outputs: Of the whole linear.
        shards: Number of equal shards; if fewer than ranks, adjacent ranks have copies of a shard,
            as with fewer key-value heads than ranks.
        stored: Its layout in the tensor of that name.
    """

    name: str
    outputs: int
    shards: int
    stored: CheckpointLayout = WHOLE_TENSOR

    def piece(self) -> int:
        """Outputs on one rank."""
        return self.outputs // self.shards

    def start(self, rank: int, ranks: int) -> int:
        """The first output that a rank has."""
        return rank * self.shards // ranks * self.piece()


def weight_sources(
    part: LinearPart,
    inputs: int,
    cut: RankSlice,
    build: BuildContext,
    method: LinearMethod,
    weights: LinearWeights,
) -> Iterator[WeightSource]:
    """The checkpoint tensors of a linear's weight, in whatever layout it is stored.

    Args:
        part: The checkpoint's linear.
        inputs: Of it.
        cut: The slice of it to load, and where to.
        build: Gives the storage layout.
        method: Loads the slice
        weights: into these weights.

    Raises:
        ValueError: A weight of that shape cannot be stored in that layout.
    """
    storage = build.storage(part.name)
    if storage is not None:
        yield from _quantized_sources(part, inputs, cut, storage, method, weights)
        return

    def load(tensor: Tensor) -> None:
        own = part.stored.extract("weight", part.outputs, tensor)
        method.load(weights, "weight", own, cut)

    shape = part.stored.shape("weight", part.outputs, inputs)
    yield WeightSource(f"{part.name}.weight", shape, load)


def _source_of_bias(
    part: LinearPart, cut: RankSlice, method: LinearMethod, weights: LinearWeights
) -> WeightSource:
    def load(tensor: Tensor) -> None:
        method.load(weights, "bias", part.stored.extract("bias", part.outputs, tensor), cut)

    return WeightSource(f"{part.name}.bias", part.stored.shape("bias", part.outputs, 0), load)


def _quantized_sources(
    part: LinearPart,
    inputs: int,
    cut: RankSlice,
    storage: StorageLayout,
    method: LinearMethod,
    weights: LinearWeights,
) -> Iterator[WeightSource]:
    stored = part.stored
    if stored.transposed:
        raise ValueError(f"{part.name}: weights stored as (inputs, outputs) are not quantized")

    def take(_: int, row: int, piece: LoadedWeight) -> None:
        method.load(weights, "weight", piece, RankSlice(slice(None), slice(None), cut.into + row))

    pieces: list[LoadedWeight] = []

    def take_all(_: int, row: int, piece: LoadedWeight) -> None:
        pieces.append(piece)
        if row + len(piece) == outputs:
            own = _picked(stored, part.outputs, concat_weights(pieces))
            pieces.clear()
            method.load(weights, "weight", own, cut)

    outputs, _ = stored.shape("weight", part.outputs, inputs)
    shape = (outputs, inputs)
    if stored == WHOLE_TENSOR:
        own = StoredPart(_bounds(cut.outputs, outputs), _bounds(cut.inputs, inputs))
        yield from quantized_sources(part.name, storage, shape, own, take)
    else:
        everything = StoredPart(slice(0, outputs), slice(0, inputs))
        yield from quantized_sources(part.name, storage, shape, everything, take_all)


def _picked(stored: CheckpointLayout, outputs: int, weight: LoadedWeight) -> LoadedWeight:
    if isinstance(weight, Int8Weight):
        scales = stored.extract("bias", outputs, weight.scales)
        return Int8Weight(stored.extract("weight", outputs, weight.steps), scales)
    return stored.extract("weight", outputs, weight)


def _bounds(part: slice, total: int) -> slice:
    start, stop, _ = part.indices(total)
    return slice(start, stop)


class ColumnLinear:
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
        self._parts = parts
        self._build = build
        self._tp = build.tp
        self._method = method = build.method([part.name for part in parts], method)
        self._inputs = inputs
        self._bias = bias
        outputs = sum(part.piece() for part in parts)
        self._weights = method.create(LinearShape(inputs, outputs, bias, halves), build)

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """Multiply: x (T, I)  ->  (T, O / ranks), the parts concatenated."""
        return ctx.adapt(self.name, x, self._method.apply(self._weights, x))

    @property
    def packed(self) -> CompiledLinear | None:
        """The whole linear in packed form for the CPU kernels, if it is packed."""
        return None if self._weights.packed is None else self._weights.packed.linear

    def sources(self) -> Iterator[WeightSource]:
        """The checkpoint's tensors of each part."""
        into = 0
        for part in self._parts:
            start = part.start(self._tp.rank, self._tp.ranks)
            cut = RankSlice(slice(start, start + part.piece()), slice(None), into)
            yield from weight_sources(
                part, self._inputs, cut, self._build, self._method, self._weights
            )
            if self._bias:
                yield _source_of_bias(part, cut, self._method, self._weights)
            into += part.piece()

    def pack(self) -> None:
        """Prepare weights for computing; called once all sources are loaded."""
        self._method.pack(self._weights)


class RowLinear:
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
        self._inputs = inputs
        self._part = LinearPart(name, outputs, shards=1, stored=stored)
        self._method = method = build.method((name,), method)
        self._build = build
        self._tp = build.tp
        share = build.share(inputs, name)
        self._cut = RankSlice(
            slice(None), slice(build.tp.rank * share, (build.tp.rank + 1) * share), into=0
        )
        self._bias_within = bias and build.tp.ranks == 1
        self._weights = method.create(LinearShape(share, outputs, self._bias_within), build)
        self._bias = build.empty(outputs) if bias and not self._bias_within else None

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """Multiply: x (T, I / ranks)  ->  (T, O), the same on every rank."""
        partial = ctx.adapt(self.name, x, self._method.apply(self._weights, x))
        total = ctx.tp.all_reduce(partial)
        return total if self._bias is None else total + self._bias

    @property
    def packed(self) -> CompiledLinear | None:
        """The whole linear in packed form for the CPU kernels, if packed and on a single rank."""
        if self._weights.packed is None or self._tp.ranks > 1:
            return None
        return self._weights.packed.linear

    def sources(self) -> Iterator[WeightSource]:
        """The checkpoint's weight, and its bias if it has one."""
        yield from weight_sources(
            self._part, self._inputs, self._cut, self._build, self._method, self._weights
        )
        if self._bias_within:
            yield _source_of_bias(self._part, self._cut, self._method, self._weights)
        if self._bias is not None:
            yield from replicated_source(f"{self.name}.bias", self._bias)

    def pack(self) -> None:
        """Prepare weights for computing; called once all sources are loaded."""
        self._method.pack(self._weights)


class ReplicatedLinear(ColumnLinear):
    """A linear replicated on every rank: for small ones whose sharding would need a collective."""

    def __init__(
        self,
        name: str,
        inputs: int,
        outputs: int,
        *,
        bias: bool,
        build: BuildContext,
        method: LinearMethod,
    ) -> None:
        part = LinearPart(name, outputs, shards=1)
        super().__init__(name, inputs, (part,), bias=bias, build=build, method=method)
