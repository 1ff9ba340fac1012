"""Fields of config.json that transformers does not read for a family change nothing here either."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.models.families import ROWS
from tests.models.parity import check_logits, save

from antiphon.model_card.card import read_card

if TYPE_CHECKING:
    from pathlib import Path

BY_NAME = {row.name: row for row in ROWS}
STRAY = {
    "gpt2": {"intermediate_size": 96, "num_key_value_heads": 1, "head_dim": 8},
    "gpt neox": {"num_key_value_heads": 1},
}


@pytest.mark.parametrize("name", sorted(STRAY))
def test_a_stray_field_changes_neither_plan_nor_logits(tmp_path: Path, name: str) -> None:
    saved = save(BY_NAME[name], tmp_path)
    card = read_card(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | STRAY[name]))
    assert read_card(tmp_path) == card
    check_logits(saved, "plain")
