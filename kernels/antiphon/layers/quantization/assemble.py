"""Loads the tensors of a quantized weight, one by one, and writes the weight on this rank."""

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
"""Approximate number of weights that are dequantized at once: they are float32 meanwhile."""


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
    gathering = _WeightAssembler(storage, fields, shape, part, take)
    for one in fields:
        yield WeightSource(
            name + one.suffix,
            one.shape(*shape),
            lambda tensor, one=one: gathering.add(one, tensor),
            one.dtypes,
        )


@dataclass(slots=True)
class _WeightAssembler:
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
        if not last:
            return
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
        whole = self.storage.dequantize(stored, outputs, inputs)
        return slice_weight(whole, *piece.within(wider))
