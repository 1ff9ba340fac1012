"""Scores of tiny random models with heads, through the batching loop, against transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from tests.models import families_judges
from tests.models.parity import Saved, error, save, texts
from tests.models.pooling import PoolingEngine

from antiphon.model_card.pooling import PoolMode
from antiphon.model_card.tasks import Task
from antiphon.wire.sampling import PoolParams

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

BY_NAME = {row.name: row for row in families_judges.ROWS}


@torch.inference_mode()
def theirs(saved: Saved, ids: Sequence[int], second_from: int | None = None) -> Tensor:
    """Scores of a text, or its stream."""
    types = {}
    if second_from is not None:
        types["token_type_ids"] = torch.tensor([[int(at >= second_from) for at in range(len(ids))]])
    out = saved.model(torch.tensor([list(ids)]), **types)
    return out.logits[0] if "logits" in out else out.last_hidden_state[0]


@pytest.fixture(scope="module", params=families_judges.ROWS, ids=str)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save(request.param, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("chunk", [None, 17])
def test_what_a_text_becomes_is_what_transformers_makes_of_it(
    saved: Saved, chunk: int | None
) -> None:
    engine = PoolingEngine(saved.folder, chunk=chunk)
    made = engine.vectors_of(texts())
    for ids, vector in zip(texts(), made, strict=True):
        expected = theirs(saved, ids)
        if engine.pooling.task is Task.EMBED:
            standing = {
                PoolMode.LAST: expected[-1],
                PoolMode.CLS: expected[0],
                PoolMode.MEAN: expected.mean(dim=0),
            }
            expected = torch.nn.functional.normalize(standing[engine.pooling.mode], dim=0)
        # A vector of few numbers has a deviation of its own.
        scale = max(1.0, float(expected.abs().max()))
        assert float((torch.tensor(vector) - expected).abs().max()) < 2e-4 * scale


def test_the_second_text_of_a_pair_is_told_apart(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("pair")
    saved = save(BY_NAME["BertForSequenceClassification"], folder)
    engine, ids = PoolingEngine(folder), texts()[1]
    (alone,) = engine.vectors_of([ids])
    (pair,) = engine.vectors_of([ids], PoolParams(second_from=7))
    expected = theirs(saved, ids, 7)
    assert error(torch.tensor(pair), expected) < 1e-3
    assert error(torch.tensor(alone), expected) > 1e-2


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("LlamaModel", PoolMode.LAST),
        ("BertModel", PoolMode.CLS),
        ("Gemma3TextModel that sees both ways", PoolMode.MEAN),
    ],
)
def test_without_files_that_say_so_a_family_pools_by_its_habit(
    name: str, mode: PoolMode, tmp_path: Path
) -> None:
    assert PoolingEngine(save(BY_NAME[name], tmp_path).folder).pooling.mode is mode
