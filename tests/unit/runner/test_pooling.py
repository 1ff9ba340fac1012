"""Vectors of prompts, however they were cut and whatever ran beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tests.models.model_loop import POOLED
from tests.support.worker import step_plan
from torch.nn.functional import normalize

from antiphon.model_card.config_json import Task
from antiphon.model_card.pooling import Pooling, PoolingActivation, PoolMode
from antiphon.model_worker.batching.plan import PoolingRequest
from antiphon.model_worker.runner.pooling import Pooler, PoolingLinear
from antiphon.wire.tokenize import PoolingCard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

HIDDEN = 6
STATES = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(1))
IDS = np.arange(40, dtype=np.int32) % 11
EXPECTED = {**POOLED, "end": lambda stream: stream[min(10, len(stream) - 1)]}
"""The first token with the highest id is the one at 10."""
Row = tuple[int, int, int]
"""Slot, and where its piece of `STATES` begins and ends."""


def pooler(
    mode: PoolMode,
    *linears: PoolingLinear,
    task: Task = Task.EMBED,
    normalize: bool = False,
    end_id: int | None = None,
) -> Pooler:
    pooling = Pooling(
        mode=mode, task=task, end_id=end_id, normalize=normalize, card=PoolingCard(width=HIDDEN)
    )
    return Pooler(pooling, linears)


def pool(at: Pooler, rows: Sequence[Row], ends: Sequence[bool], *dimensions: int) -> list[Tensor]:
    plan = step_plan(
        [end - start for _, start, end in rows],
        slot=np.array([slot for slot, _, _ in rows], np.int32),
        kv_len=np.array([end for _, _, end in rows], np.int32),
        tokens=np.concatenate([IDS[start:end] for _, start, end in rows]),
        logit_tokens=np.zeros(0, np.int32),
        pooling=PoolingRequest(
            ends=np.array(ends, np.bool_),
            dimensions=np.array(dimensions or [0] * len(rows), np.int32),
        ),
    )
    hidden = torch.cat([STATES[start:end] for _, start, end in rows])
    vectors = at.pool(plan, hidden, lambda pooled: pooled[:, :2] * 2)
    pieces = np.split(vectors.values, vectors.starts[1:-1])
    return [torch.as_tensor(piece) for piece in pieces]


@pytest.mark.parametrize("mode", list(PoolMode))
def test_a_prompt_in_pieces_has_the_bits_of_a_whole_one(mode: PoolMode) -> None:
    (whole,) = pool(pooler(mode), [(0, 0, 40)], [True])
    torch.testing.assert_close(whole, EXPECTED[mode](STATES))
    at = pooler(mode)
    first, beside = pool(at, [(3, 0, 17), (5, 0, 9)], [False, True])
    assert not len(first)
    torch.testing.assert_close(beside, EXPECTED[mode](STATES[:9]))
    assert not len(pool(at, [(3, 17, 18)], [False])[0])
    _, last = pool(at, [(5, 0, 4), (3, 18, 40)], [False, True])
    assert torch.equal(last, whole)


@pytest.mark.parametrize("mode", list(PoolMode))
def test_a_piece_that_is_run_again_counts_once(mode: PoolMode) -> None:
    at = pooler(mode)
    for rows in ([(0, 0, 10)], [(0, 10, 20)], [(0, 10, 20)], [(0, 20, 30)]):
        pool(at, rows, [False])
    (again,) = pool(at, [(0, 20, 40)], [True])
    torch.testing.assert_close(again, EXPECTED[mode](STATES))


@pytest.mark.parametrize("mode", list(PoolMode))
def test_a_slot_forgets_its_last_request(mode: PoolMode) -> None:
    at = pooler(mode)
    pool(at, [(0, 0, 10)], [False])  # of a request that was dropped
    (other,) = pool(at, [(0, 0, 5)], [True])
    torch.testing.assert_close(other, EXPECTED[mode](STATES[:5]))


@pytest.mark.parametrize(
    ("end_id", "last", "at"), [(3, 20, 3), (3, 2, 1), (10, 20, 10), (11, 20, 19)]
)
def test_an_end_token_is_found_in_any_piece(end_id: int, last: int, at: int) -> None:
    """Without one the last token stands for the text."""
    pooler_ = pooler(PoolMode.END, end_id=end_id)
    for start in range(last - 1):
        pool(pooler_, [(0, start, start + 1)], [False])
    (by_pieces,) = pool(pooler_, [(0, last - 1, last)], [True])
    (whole,) = pool(pooler_, [(0, 0, last)], [True])
    assert torch.equal(by_pieces, STATES[at])
    assert torch.equal(whole, STATES[at])


@pytest.mark.parametrize("mode", [PoolMode.CLS, PoolMode.MEAN, PoolMode.END])
def test_a_prompt_whose_beginning_was_not_run_is_a_bug_and_no_vector(mode: PoolMode) -> None:
    with pytest.raises(AssertionError):
        pool(pooler(mode), [(0, 10, 20)], [True])


def test_a_vector_is_cut_and_then_has_length_one() -> None:
    at = pooler(PoolMode.LAST, normalize=True)
    whole, part = pool(at, [(0, 0, 8), (1, 0, 8)], [True, True], 0, 4)
    torch.testing.assert_close(whole, normalize(STATES[7], dim=0))
    torch.testing.assert_close(part, normalize(STATES[7, :4], dim=0))


def test_linears_come_after_the_pooling_and_before_the_length() -> None:
    weight, bias = torch.randn(3, HIDDEN), torch.randn(3)
    at = pooler(PoolMode.LAST, PoolingLinear(weight, bias, PoolingActivation.TANH), normalize=True)
    (vector,) = pool(at, [(0, 0, 8)], [True])
    expected = normalize(torch.tanh(weight @ STATES[7] + bias), dim=0)
    torch.testing.assert_close(vector, expected)


def test_a_model_that_scores_is_given_what_stands_for_the_text() -> None:
    at = pooler(PoolMode.LAST, task=Task.SCORE)
    (scores,) = pool(at, [(0, 0, 8)], [True])
    torch.testing.assert_close(scores, STATES[7, :2] * 2)
