"""A model on two ranks samples the tokens of one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.models.parity import save
from tests.models.rank import check_two_ranks
from tests.models.specs import BY_NAME
from tests.models.tiny import write_llama
from tests.support.models import load

from antiphon.model_worker.model.errors import ModelLoadError

if TYPE_CHECKING:
    from pathlib import Path

SHAPES: tuple[dict[str, object], ...] = (
    {"attention_bias": True, "mlp_bias": True},
    {"num_key_value_heads": 1, "tie_word_embeddings": True},  # fewer kv heads than ranks
)


@pytest.mark.timeout(90)
def test_two_ranks_sample_the_tokens_of_one(tmp_path: Path) -> None:
    for index, shape in enumerate(SHAPES):
        write_llama(tmp_path / f"case-{index}" / "model", shape)
    for tokens in check_two_ranks(tmp_path).values():
        assert sum(map(len, tokens)) > 36


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "rows",
    [
        [(name, {}) for name in ("qwen2-moe", "gpt-oss", "deepseek-v3")],
        # B and C of the one group are on both ranks; its norm could not be.
        [
            ("qwen3-next", {}),
            ("falcon-h1", {}),
            ("falcon-h1", {"mamba_n_groups": 1, "mamba_rms_norm": False}),
        ],
    ],
    ids=["experts", "states"],
)
def test_two_ranks_sample_the_tokens_of_one_of_every_family(
    tmp_path: Path, rows: list[tuple[str, dict[str, object]]]
) -> None:
    for index, (name, fields) in enumerate(rows):
        row = BY_NAME[name]
        folder = tmp_path / f"case-{index}" / "model"
        save(replace(row, fields={**row.fields, **fields}), folder)
    check_two_ranks(tmp_path, vocabulary=128)


class Cut:
    """A rank of a model whose weights do not fit."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks

    def all_reduce(self, x):
        raise AssertionError("nothing runs before the weights fit")

    all_gather = all_reduce


def test_ranks_that_cannot_cut_the_model_are_refused(llama: Path) -> None:
    with pytest.raises(ModelLoadError, match="3 ranks"):
        load(llama, tp=Cut(1, 3))


def test_a_norm_that_ranks_cannot_share_is_refused(tmp_path: Path) -> None:
    row = BY_NAME["falcon-h1"]
    save(replace(row, fields={**row.fields, "mamba_n_groups": 1}), tmp_path)
    match = "groups that are normalised: 1 is not divisible by 2 ranks"
    with pytest.raises(ModelLoadError, match=match):
        load(tmp_path, tp=Cut(1, 2))
