"""bitsandbytes cuts a weight into blocks as if it were one row, wherever its outputs end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import pytest
import torch
from tests.models.quantization.made import bits_and_bytes
from tests.models.quantization.rows import ROWS, write
from tests.models.test_llama_parity import assert_close, logits_of, prompts
from tests.support.models import open_model

from antiphon.layers.linear import quantized_sources
from antiphon.layers.quantization.four_bit import BitsAndBytesStorage
from antiphon.layers.quantization.storage import (
    LoadedWeight,
    WeightSlice,
    dequantized,
)

if TYPE_CHECKING:
    from pathlib import Path

SHAPES = [(96, 72), (40, 80), (33, 50), (7, 10), (1, 130), (600, 100)]
FOUR_BIT = [("nf4", False), ("nf4", True), ("fp4", False)]


@pytest.mark.parametrize(("kind", "nested"), FOUR_BIT)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_inputs_need_not_be_whole_blocks(
    kind: Literal["nf4", "fp4"], nested: bool, outputs: int, inputs: int
) -> None:
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0))
    # As one row, which it stores to the same bytes: of (40, 80) its kernel for a CPU (0.50) gives
    # weights another block's magnitude than it was rounded by.
    made = bits_and_bytes(kind, nested=nested)(weight.view(1, -1))
    whole = made.whole.view(outputs, inputs)
    assert (whole - weight).abs().max() < 0.17 * weight.abs().max(), "rounded, and no more"
    half = slice(outputs // 3, outputs - outputs // 4), slice(inputs // 4, inputs - 1)
    for rows, columns in ((slice(0, outputs), slice(0, inputs)), half):
        into = torch.full((rows.stop - rows.start, columns.stop - columns.start), float("nan"))

        def take(row: int, piece: LoadedWeight, into: torch.Tensor = into) -> None:
            into[row : row + len(piece)] = dequantized(piece)

        storage = BitsAndBytesStorage(kind, nested)
        for source in quantized_sources(
            "a", storage, (outputs, inputs), WeightSlice(rows, columns), take
        ):
            tensor = made.stored[source.name.removeprefix("a")]
            assert source.shape in (tuple(tensor.shape), (-1,)), source.name
            source.load(tensor)
        assert torch.equal(into, whole[rows, columns])


@pytest.mark.parametrize("name", ["bitsandbytes nf4", "bitsandbytes nf4, nested"])
def test_a_model_whose_sizes_are_no_whole_blocks_is_served(
    tmp_path: Path, reference, name: str
) -> None:
    row = next(row for row in ROWS if row.name == name)
    sizes = {"hidden_size": 72, "intermediate_size": 100, "num_hidden_layers": 2}
    stored, plain = write(tmp_path, row, sizes)
    ids = prompts()[-1]
    model = open_model(stored, dtype="float32")
    assert_close(logits_of(model, ids, 31), reference(plain).logits(ids))
