"""From the tensors of a stored weight, one by one as they are read, to its place on this rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from antiphon.layers.quantization.storage import WeightSlice, slice_weight
from antiphon.layers.weights import WeightSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from antiphon.layers.quantization.storage import (
        LoadedWeight,
        StorageLayout,
        WeightField,
        WeightFields,
    )

PIECE_NUMBERS = 1 << 20
"""Weights that are made whole at once, about: they are float32 for that moment."""


def quantized_sources(
    name: str,
    storage: StorageLayout,
    shape: tuple[int, int],
    part: WeightSlice,
    take: Callable[[int, int, LoadedWeight], None],
    *,
    experts: int | None = None,
) -> Iterator[WeightSource]:
    """The tensors of a stored weight; with the last of them, the rank's part of it is taken.

    Whatever is cut, the result is the same part of the whole weight: where a cut goes through what
    shares a scale or a word, more is made whole than is taken.

    Args:
        name: Of the linear.
        storage: How its weight is stored.
        shape: Outputs and inputs of the whole weight.
        part: What of it this rank takes.
        take: Called with an expert, a row of the part, and the weights from that row on.
        experts: The tensors hold so many weights, along one axis more in front; unset: one.

    Raises:
        ValueError: A weight of that shape cannot be stored so; names the linear.
    """
    try:
        fields = storage.fields(*shape)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    gathering = _WeightAssembler(storage, fields, shape, part, take, experts)
    front = () if experts is None else (experts,)
    for one in fields:
        yield WeightSource(
            name + one.suffix,
            (*front, *one.shape(*shape)),
            lambda tensor, one=one: gathering.add(one, tensor),
            one.dtypes,
        )


@dataclass(slots=True)
class _WeightAssembler:
    """The tensors of one stored weight that have come."""

    storage: StorageLayout
    fields: WeightFields
    shape: tuple[int, int]
    part: WeightSlice
    take: Callable[[int, int, LoadedWeight], None]
    experts: int | None
    received: dict[str, Tensor] = field(default_factory=dict[str, "Tensor"])

    def add(self, one: WeightField, tensor: Tensor) -> None:
        """Keep a tensor until the last one comes; that one is used where it lies."""
        last = len(self.received) + 1 == len(self.fields)
        self.received[one.suffix] = tensor if last else tensor.clone()
        if not last:
            return
        for expert in range(self.experts or 1):
            self._place(expert)
        self.received.clear()

    def _place(self, expert: int) -> None:
        outputs, columns = self.part.outputs, self.part.inputs
        rows = max(PIECE_NUMBERS // self.shape[1], 1)
        # Not into what shares a scale: that would be made whole twice.
        whole = WeightSlice(slice(0, rows), columns).aligned(self.fields, *self.shape)
        rows = max(whole.outputs.stop, 1)
        for start in range(outputs.start, outputs.stop, rows):
            piece = WeightSlice(slice(start, min(start + rows, outputs.stop)), columns)
            self.take(expert, start - outputs.start, self._whole(expert, piece))

    def _whole(self, expert: int, piece: WeightSlice) -> LoadedWeight:
        wider = piece.aligned(self.fields, *self.shape)
        stored = {one.suffix: self._cut(one, expert, wider) for one in self.fields}
        outputs = wider.outputs.stop - wider.outputs.start
        inputs = wider.inputs.stop - wider.inputs.start
        whole = self.storage.dequantize(stored, outputs, inputs)
        return slice_weight(whole, *piece.within(wider))

    def _cut(self, one: WeightField, expert: int, wider: WeightSlice) -> Tensor:
        tensor = self.received[one.suffix]
        return one.cut(tensor if self.experts is None else tensor[expert], wider)
