"""A model on two ranks samples the tokens of one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.models.rank import check_two_ranks
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
        case = tmp_path / f"case-{index}"
        case.mkdir()
        write_llama(case / "model", shape)
    for tokens in check_two_ranks(tmp_path).values():
        assert sum(map(len, tokens)) > 36


class OneOfThree:
    rank, ranks = 1, 3

    def all_reduce(self, x):
        raise AssertionError("nothing runs before the weights fit")

    all_gather = all_reduce


def test_ranks_that_cannot_cut_the_model_are_refused(llama: Path) -> None:
    with pytest.raises(ModelLoadError, match="3 ranks"):
        load(llama, tp=OneOfThree())
