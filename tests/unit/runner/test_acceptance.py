from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from antiphon.model_worker.runner.sampling import accept


def accepted(rows: list[tuple[list[int], list[int]]], failed: tuple[int, ...] = ()):
    """Rows of (tokens, what was sampled after the last len(sampled) of them)."""
    tokens = np.array([token for row, _ in rows for token in row], np.int32)
    ends = np.cumsum([len(row) for row, _ in rows])
    wanted = [
        np.arange(end - len(sampled), end) for end, (_, sampled) in zip(ends, rows, strict=True)
    ]
    starts, ids = accept(
        tokens,
        np.concatenate(wanted).astype(np.int32),
        np.repeat(np.arange(len(rows)), [len(sampled) for _, sampled in rows]),
        np.array([token for _, sampled in rows for token in sampled], np.int32),
        len(rows),
        np.isin(np.arange(len(rows)), failed) if failed else None,
    )
    return [ids[a:b].tolist() for a, b in pairwise(starts)]


def test_a_decode_row_accepts_its_one_token() -> None:
    assert accepted([([7], [3]), ([3], [9])]) == [[3], [9]]


def test_a_chunk_without_logits_accepts_nothing() -> None:
    assert accepted([([7, 8, 9], []), ([3], [9])]) == [[], [9]]


@pytest.mark.parametrize("right", range(4))
def test_a_draft_is_accepted_up_to_its_first_mistake(right: int) -> None:
    sampled = [11, 12, 13, 14]
    draft = [s if i < right else 99 for i, s in enumerate(sampled[:3])]
    rows = [([5], [6]), ([10, *draft], sampled), ([12], [13])]
    assert accepted(rows) == [[6], sampled[: right + 1], [13]]


def test_a_draft_that_is_right_again_after_a_mistake_stays_refused() -> None:
    assert accepted([([10, 99, 12, 13], [11, 12, 13, 14])]) == [[11]]


def test_a_failed_row_accepts_nothing_and_costs_no_other() -> None:
    rows = [([10, 11], [11, 12]), ([1], [2]), ([3, 4], [4, 5])]
    assert accepted(rows, failed=(1,)) == [[11, 12], [], [4, 5]]
