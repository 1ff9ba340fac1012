"""A quantized checkpoint that does not hold what it says is refused by name, and nothing runs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from safetensors.torch import load_file, save_file
from tests.models.quantization.rows import ROWS, write
from tests.support.models import load

from antiphon.config.model import LoadFormat
from antiphon.model_card.files import find_files
from antiphon.model_worker.model.errors import ModelLoadError

if TYPE_CHECKING:
    from pathlib import Path


def test_inputs_of_a_group_that_is_not_there_are_refused(tmp_path: Path) -> None:
    row = next(row for row in ROWS if row.name == "gptq in order of size")
    stored, _ = write(tmp_path, row)
    name = "model.layers.0.mlp.up_proj.g_idx"
    tensors = load_file(stored / "model.safetensors")
    save_file(tensors | {name: tensors[name] + 1}, stored / "model.safetensors")
    with pytest.raises(ModelLoadError, match="group indices of inputs exceed the 4 groups"):
        load(stored)


def test_what_belongs_to_no_linear_is_unexpected_unless_it_is_blank(tmp_path: Path) -> None:
    row = next(row for row in ROWS if row.name == "gptq asymmetric")
    stored, _ = write(tmp_path, row)
    name = "model.layers.0.mlp.up_proj.bias"
    tensors = load_file(stored / "model.safetensors")
    assert name in tensors
    save_file(tensors | {name: tensors[name] + 1}, stored / "model.safetensors")
    with pytest.raises(ModelLoadError, match=f"unexpected: {name}$"):
        load(stored)


def test_a_linear_that_is_stored_otherwise_than_its_config_says_is_named(tmp_path: Path) -> None:
    row = next(row for row in ROWS if row.name == "fp8 block")
    stored, _ = write(tmp_path, row)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(stored / "model.safetensors")
    save_file(tensors | {name: tensors[name].float()}, stored / "model.safetensors")
    with pytest.raises(ModelLoadError, match=f"{name} float32, not float8_e4m3fn"):
        load(stored)
    config = json.loads((stored / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps(config | {"quantization_config": None}))
    with pytest.raises(ModelLoadError, match="not float32 or bfloat16 or float16"):
        load(stored)


def test_sizes_that_cannot_be_stored_so_are_named(tmp_path: Path) -> None:
    row = next(row for row in ROWS if row.name == "awq")
    stored, _ = write(tmp_path, row)
    overrides = json.dumps({"quantization_config": {"quant_method": "awq", "group_size": 96}})
    with pytest.raises(
        ModelLoadError, match=r"q_proj: 256 inputs .* divisible by the group size 96"
    ):
        load(find_files(stored, overrides=overrides))


def test_dummy_weights_are_plain_numbers(tmp_path: Path) -> None:
    stored, _ = write(tmp_path, next(row for row in ROWS if row.name == "awq"))
    with pytest.raises(ModelLoadError, match="dummy weights are plain numbers"):
        load(find_files(stored, LoadFormat.DUMMY))
    nothing = json.dumps({"quantization_config": None})
    assert load(find_files(stored, LoadFormat.DUMMY, overrides=nothing)).spec.layers
