"""What Llama 4's configs may not say."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.models.families_moe import ROWS
from tests.models.parity import save
from tests.support.models import load, open_model

from antiphon.model_worker.model.errors import ModelLoadError

if TYPE_CHECKING:
    from pathlib import Path

LLAMA4 = next(row for row in ROWS if row.name == "llama4")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layer_types", ["sliding_attention"] * 3),
        ("no_rope_layers", [1, 0]),
        ("num_experts_per_tok", 7),
    ],
)
def test_what_it_cannot_be_is_refused(tmp_path: Path, field: str, value: object) -> None:
    save(LLAMA4, tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), field: value}))
    with pytest.raises(ModelLoadError, match=r"config\.json: "):
        load(tmp_path)


def test_runs_of_tokens_are_whole_pages(tmp_path: Path) -> None:
    save(LLAMA4, tmp_path)
    with pytest.raises(ModelLoadError, match="attention_chunk_size 20: pages of 16 tokens"):
        open_model(tmp_path, page_tokens=16, pages=8)
