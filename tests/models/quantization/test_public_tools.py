"""Checkpoints as the public tools wrote them: `fixtures/make.py` says how.

What ours makes of a folder is what the tool itself makes of it, to the bit; and a model with those
weights says the same.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tests.models.parity import LINEARS
from tests.models.quantization.made import bits_and_bytes
from tests.models.quantization.rows import BY_NAME, write
from tests.models.stepper import logits_of, prompts
from tests.models.test_llama_parity import assert_close
from tests.support.models import open_model
from torch import Tensor

from antiphon.layers.linear import quantized_sources
from antiphon.layers.quantization.four_bit import BitsAndBytesStorage
from antiphon.layers.quantization.storage import LoadedWeight, WeightSlice, dequantized
from antiphon.model_card.card import read_card
from antiphon.model_worker.model.load import storage_of
from antiphon.model_worker.model.weights import Checkpoint

FOLDERS = sorted(file.parent for file in (Path(__file__).parent / "fixtures").glob("*/config.json"))
LIMIT = 2e-5
"""Of logits, in their standard deviations, whatever the method: what is multiplied is the same."""
BYTES_MAX = 60 << 10
"""Of one folder."""


@dataclass(frozen=True)
class Expected:
    """What the tool makes of its own checkpoint."""

    folder: Path

    @cached_property
    def said(self) -> dict[str, str]:
        with safe_open(self.folder / "expected.tensors", "pt") as file:
            return file.metadata() or {}

    @cached_property
    def digests(self) -> dict[str, str]:
        return json.loads(self.said["weights"])

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        return load_file(self.folder / "expected.tensors")


@pytest.fixture(params=FOLDERS, ids=lambda folder: folder.name)
def expected(request: pytest.FixtureRequest) -> Expected:
    return Expected(request.param)


def read(folder: Path, name: str, shape: tuple[int, int]) -> Tensor:
    said = read_card(folder).quantization
    assert said is not None
    scheme = said.scheme(name)
    assert scheme is not None, name
    into = torch.full(shape, float("nan"))

    def take(row: int, piece: LoadedWeight) -> None:
        into[row : row + len(piece)] = dequantized(piece)

    checkpoint = Checkpoint.open(folder)
    checkpoint.rename_endings(said.spelled)
    everything = WeightSlice(slice(0, shape[0]), slice(0, shape[1]))
    checkpoint.load(quantized_sources(name, storage_of(scheme), shape, everything, take))
    return into


def shape_of(folder: Path, kind: str) -> tuple[int, int]:
    """Outputs and inputs of a linear."""
    width = json.loads((folder / "config.json").read_text())["intermediate_size"]
    outputs = {"k_proj": 16, "v_proj": 16, "gate_proj": width, "up_proj": width}
    return outputs.get(kind, 64), width if kind == "down_proj" else 64


def test_weights_are_to_the_bit_what_the_tool_makes_of_them(expected: Expected) -> None:
    assert len(expected.digests) == 14
    for weight, digest in expected.digests.items():
        name = weight.removesuffix(".weight")
        found = read(expected.folder, name, shape_of(expected.folder, name.rpartition(".")[2]))
        assert hashlib.sha256(found.numpy().tobytes()).hexdigest() == digest, name


@pytest.mark.parametrize("linear", LINEARS)
def test_logits_are_those_of_a_model_with_these_weights(expected: Expected, linear: str) -> None:
    model = open_model(expected.folder, pages=32, dtype="float32", linear=linear, quantized=linear)
    ids = expected.tensors["ids"].tolist()
    assert_close(logits_of(model, ids, 7), expected.tensors["logits"], LIMIT)


def test_it_is_small_and_names_what_made_it(expected: Expected) -> None:
    assert {"torch", "transformers"} < json.loads(expected.said["versions"]).keys()
    assert sum(file.stat().st_size for file in expected.folder.iterdir()) <= BYTES_MAX


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
            assert source.load is not None
            source.load(tensor)
        assert torch.equal(into, whole[rows, columns])


@pytest.mark.parametrize("name", ["bitsandbytes nf4", "bitsandbytes nf4, nested"])
def test_a_model_whose_sizes_are_no_whole_blocks_is_served(
    tmp_path: Path, reference, name: str
) -> None:
    sizes = {"hidden_size": 72, "intermediate_size": 100, "num_hidden_layers": 2}
    stored, plain = write(tmp_path, BY_NAME[name], sizes)
    ids = prompts()[-1]
    model = open_model(stored, dtype="float32")
    assert_close(logits_of(model, ids, 31), reference(plain).logits(ids))
