"""Modules with weights, and the checkpoint tensors that they load, declared before any is read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch

from antiphon.kernels.cpu.linear import Grouping
from antiphon.kernels.linear_fp8 import is_multiplied
from antiphon.kernels.linear_grouped import codes_of
from antiphon.kernels.triton.backend import INTERPRETER
from antiphon.layers.methods import ON_DEVICE, CodesInGroups, Fp8Codes, LinearMethod
from antiphon.layers.quantization.eight_bit import Fp8Storage, OnlineFp8Storage
from antiphon.layers.quantization.storage import (
    ANY,
    FLOATS,
    StorageLayout,
    common_grouping,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

    from antiphon.kernels.kv import PageLayout
    from antiphon.layers.methods import LinearShape, LinearWeights, OpCodes, OpWeights


@dataclass(frozen=True, slots=True)
class WeightSource:
    name: str
    # Of the whole tensor, whatever part of it this rank has; a length may be `ANY`.
    shape: tuple[int, ...]
    # Copies this rank's part of the whole tensor; None: other ranks have it, and it is not read.
    load: Callable[[Tensor], None] | None
    dtypes: tuple[torch.dtype, ...] = FLOATS  # allowed dtypes
    rows: slice | None = None  # of its first axis, those that `load` uses; None: all

    def elsewhere(self) -> WeightSource:
        """The same tensor, of which this rank has no part."""
        return replace(self, load=None)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape matches; a scalar may have no axis."""
        found = shape or (1,)
        pairs = zip(found, self.shape, strict=False)
        return len(found) == len(self.shape) and all(want in (have, ANY) for have, want in pairs)


class Module:
    """Something that has weights, or consists of modules that have."""

    # Names of the kernels that it calls itself through `ctx.ops`.
    kernels: frozenset[str] = frozenset()
    # Its modules, in the order in which their tensors are loaded; None for one that it lacks.
    children: tuple[Module | None, ...] = ()

    @property
    def operations(self) -> frozenset[str]:
        """Names of the kernels that it and its modules call."""
        return self.kernels.union(*(child.operations for child in filter(None, self.children)))

    def sources(self) -> Iterator[WeightSource]:
        """The checkpoint's tensors that it loads."""
        for child in filter(None, self.children):
            yield from child.sources()

    def pack(self) -> None:
        """Prepare weights for computing; called once all sources are loaded."""
        for child in filter(None, self.children):
            child.pack()


class Tp(Protocol):
    """The tensor-parallel group of a rank: which one it is, and two collectives."""

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> int: ...

    @property
    def invariant(self) -> bool:
        """Whether sums are batch-invariant: their bits depend on no other element."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks; `x` may be overwritten."""
        ...

    def all_gather(self, x: Tensor) -> Tensor: ...


class SingleRank:
    rank = 0
    ranks = 1
    invariant = True

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x


class Pp(Protocol):
    """The pipeline of a rank: its stage, and how the residual stream passes from stage to stage."""

    @property
    def stage(self) -> int: ...

    @property
    def stages(self) -> int: ...

    def send(self, x: Tensor) -> None:
        """Send to the next stage, which receives in this order. May return before it does."""
        ...

    def receive(self, out: Tensor) -> None:
        """Wait for what the stage before sends, of the shape and dtype of `out`."""
        ...


@dataclass(frozen=True, slots=True)
class CheckpointQuantization:
    """Which linears of a checkpoint are quantized, and their method in memory."""

    method: LinearMethod  # of linears all of whose parts are quantized
    storage: Callable[[str], StorageLayout | None]  # of a linear by its name; None: not quantized


@dataclass(frozen=True, slots=True)
class BuildContext:
    """The context in which every layer is built: the rank, dtype and device of its weights.

    `quantization` gives the linears that the checkpoint quantizes; unset: none. `cache_dtype` is
    the dtype of the KV cache; unset: that of the model. The ranks are `ep_ranks` equal parts: each
    has a range of the experts of every layer, and its ranks have a range of their width. `pp` is
    unset where there is one stage, which has all layers. `attention` are those of the ranks
    that attend to the same requests as this one; unset: all of them do. On an `interpreted` device
    Triton's interpreter runs the kernels, on CPU tensors.
    """

    tp: Tp
    dtype: torch.dtype
    device: torch.device
    quantization: CheckpointQuantization | None = None
    cache_dtype: torch.dtype | None = None
    ep_ranks: int = 1
    pp: Pp | None = None
    attention: Tp | None = None
    interpreted: bool = False

    @property
    def attention_group(self) -> int | None:
        """The number of this rank's group, among those that attend to different requests."""
        return None if self.attention is None else self.tp.rank // self.attention.ranks

    @property
    def of_mixers(self) -> BuildContext:
        """The context of what mixes the tokens of a sequence, and of what it caches."""
        return self if self.attention is None else replace(self, tp=self.attention)

    @property
    def device_kind(self) -> str:
        """The kind of the device by which kernels are chosen: cpu, cuda or interpreter."""
        return INTERPRETER if self.interpreted else self.device.type

    @property
    def page_layout(self) -> PageLayout:
        """The layout in which the kernels of the device read pages."""
        return "words" if self.device_kind == "cpu" else "rows"

    @property
    def is_first_stage(self) -> bool:
        return self.pp is None or self.pp.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp is None or self.pp.stage == self.pp.stages - 1

    def stage_layers(self, count: int) -> range:
        """Those of so many layers that this stage has. The first stages have one more, if any.

        Raises:
            ValueError: There are fewer layers than stages.
        """
        if self.pp is None:
            return range(count)
        stage, stages = self.pp.stage, self.pp.stages
        if count < stages:
            raise ValueError(f"{count} layers are fewer than {stages} pipeline stages")
        each, more = divmod(count, stages)
        start = stage * each + min(stage, more)
        return range(start, start + each + (stage < more))

    @property
    def kv_dtype(self) -> torch.dtype:
        return self.cache_dtype or self.dtype

    def storage(self, name: str) -> StorageLayout | None:
        return None if self.quantization is None else self.quantization.storage(name)

    def method(self, names: Iterable[str], plain: LinearMethod) -> LinearMethod:
        if self.quantization is None or any(self.storage(name) is None for name in names):
            return plain
        return self.quantization.method

    def tensor_method(self, names: Iterable[str], plain: LinearMethod) -> LinearMethod:
        """The method of a linear that calls no op of codes: on a GPU they become numbers."""
        method = self.method(names, plain)
        return plain if method in ON_DEVICE and self.device_kind != "cpu" else method

    def create(
        self,
        names: Sequence[str],
        shape: LinearShape,
        plain: LinearMethod,
        inputs: int,
        *,
        table: bool = False,
    ) -> LinearWeights:
        """Make the memory of a linear that is fused from linears with so many whole inputs.

        `table`: it is an embedding table, too.
        """
        method = self.tensor_method(names, plain)
        if table:
            method = method.for_table()
        return method.create(shape, self.dtype, self.device, self._grouping(names, shape, inputs))

    def create_linear(
        self, names: Sequence[str], shape: LinearShape, plain: LinearMethod, inputs: int
    ) -> LinearWeights | OpWeights:
        """As `create`, for a layer that calls the op of weights that stay as they are stored."""
        codes = self.op_codes(names, shape, plain, inputs)
        if codes is None:
            return self.create(names, shape, plain, inputs)
        return codes.weights(codes.empty(shape, self.dtype, self.device))

    def op_codes(
        self, names: Sequence[str], shape: LinearShape, plain: LinearMethod, inputs: int
    ) -> OpCodes | None:
        """How weights stay as they are stored, for the op that multiplies them.

        None: they do not stay so, differ in that between linears that are fused, or no kernel reads
        such groups.
        """
        method = self.method(names, plain)
        if method is LinearMethod.FP8:
            group = self._fp8_group(names, shape, inputs)
            return None if group is None else Fp8Codes(group)
        if method not in ON_DEVICE or self.device_kind == "cpu":
            return None
        grouping = Grouping(8, shape.inputs, torch.float32, minimums=False)
        if method is LinearMethod.GROUPED:
            grouping = self._grouping(names, shape, inputs)
        codes = None if grouping is None else codes_of(grouping, shape.inputs)
        if grouping is None or codes is None:
            return None
        return CodesInGroups(grouping, codes, rounding=method is LinearMethod.INT8_DYNAMIC)

    def _fp8_group(self, names: Sequence[str], shape: LinearShape, inputs: int) -> int | None:
        groups: set[int | None] = set()
        for name in names:
            storage = self.storage(name)
            known = isinstance(storage, Fp8Storage | OnlineFp8Storage)
            groups.add(storage.group(inputs) if known else None)
        group = groups.pop()
        if groups or group is None or not is_multiplied(group, inputs):
            return None
        # Ranks whose inputs begin in the middle of a group have numbers.
        if group < inputs and shape.inputs != inputs and shape.inputs % group:
            return None
        return group

    def _grouping(self, names: Iterable[str], shape: LinearShape, inputs: int) -> Grouping | None:
        groupings: list[Grouping] = []
        for name in names:
            storage = self.storage(name)
            grouping = None if storage is None else storage.grouping(inputs)
            # Ranks whose inputs begin in the middle of a group have numbers.
            if grouping is None or (shape.inputs != inputs and shape.inputs % grouping.group):
                return None
            groupings.append(grouping)
        return common_grouping(groupings)

    def empty(self, *size: int) -> Tensor:
        return torch.empty(size, dtype=self.dtype, device=self.device)

    def share(self, size: int, what: str) -> int:
        """This rank's share of a dimension.

        Raises:
            ValueError: It is not divisible by the number of ranks.
        """
        if size % self.tp.ranks:
            raise ValueError(f"{what}: {size} is not divisible by {self.tp.ranks} ranks")
        return size // self.tp.ranks


def replicated_source(name: str, weight: Tensor) -> Iterator[WeightSource]:
    yield WeightSource(name, tuple(weight.shape), lambda tensor: void(weight.copy_(tensor)))


def void(_: Tensor) -> None:
    """Drop the result of an in-place operation, so that a lambda returns nothing."""
