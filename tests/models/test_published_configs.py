"""Configs and checkpoints as they were published, which say less than what is written today."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.families import ROWS
from tests.models.parity import Saved, check_logits, save
from tests.models.specs import attention_of

from antiphon.config.card import read_card
from antiphon.config.model_fields import HABITS, NAMES
from antiphon.kernels.rotary import LinearScaling, Rotary
from antiphon.model_worker.model.load import load

if TYPE_CHECKING:
    from pathlib import Path

BY_NAME = {row.name: row for row in ROWS}


def change(saved: Saved, drop: set[str], **fields: object) -> dict[str, object]:
    file = saved.folder / "config.json"
    before = json.loads(file.read_text())
    kept = {name: value for name, value in before.items() if name not in drop}
    file.write_text(json.dumps({**kept, **fields}))
    return before


@pytest.mark.parametrize("name", ["gemma", "glm4", "gpt2", "gpt neox", "phi", "starcoder2"])
def test_what_a_config_leaves_out_is_the_habit_of_its_family(tmp_path: Path, name: str) -> None:
    saved = save(BY_NAME[name], tmp_path)
    spec, card = load(tmp_path).spec, read_card(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    habits = HABITS[config["model_type"]]
    dropped = {
        field
        for field, value in config.items()
        if field in {**habits, **dict.fromkeys(NAMES, 0)}
        and habits.get(NAMES.get(field, field)) == value
    }
    assert dropped, "this row says something else than its family's habits"
    change(saved, dropped)
    assert load(tmp_path).spec == spec
    assert read_card(tmp_path) == card


def test_gemma3_as_its_first_configs_say_it(tmp_path: Path) -> None:
    saved = save(BY_NAME["gemma3"], tmp_path)
    new = {"layer_types", "rope_parameters", "_sliding_window_pattern"}
    change(
        saved,
        new,
        sliding_window_pattern=2,
        rope_local_base_freq=500.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    local, full, last = map(attention_of, load(tmp_path).spec.layers)
    assert (local.window, full.window) == (20, None)
    assert local is last
    assert local.rotary == Rotary(32, 500.0)
    assert full.rotary == Rotary(32, 1e6, LinearScaling(8.0))
    check_logits(saved, "plain")


def test_gpt2_as_its_base_alone_was_saved(tmp_path: Path) -> None:
    saved = save(BY_NAME["gpt2"], tmp_path)
    file = tmp_path / "model.safetensors"
    bare = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    mask = {"h.0.attn.bias": torch.ones(1, 1, 8, 8), "h.0.attn.masked_bias": torch.ones(1)}
    save_file(bare | mask, file)
    check_logits(saved, "plain")


def test_phi3_with_a_rotation_of_its_old_name(tmp_path: Path) -> None:
    saved = save(BY_NAME["phi3"], tmp_path)
    spec = load(tmp_path).spec
    rope = change(saved, set())["rope_parameters"]
    assert isinstance(rope, dict)
    old = {"type": "su", "short_factor": rope["short_factor"], "long_factor": rope["long_factor"]}
    change(
        saved,
        {"rope_parameters"},
        rope_scaling=old,
        rope_theta=rope["rope_theta"],
        partial_rotary_factor=0.75,
    )
    assert load(tmp_path).spec == spec
