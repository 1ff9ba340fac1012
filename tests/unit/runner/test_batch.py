from __future__ import annotations

import numpy as np
import pytest

from antiphon.model_worker.batching.plan import future
from antiphon.model_worker.runner.input_batch import FutureTokens


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def recorded(futures: FutureTokens, slots: np.ndarray, rows: list[list[int]], failed=()) -> None:
    starts = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    ids = ints(*(token for row in rows for token in row))
    missing = np.isin(np.arange(len(rows)), failed) if failed else None
    futures.record(slots, starts, ids, missing)


def test_a_future_is_the_last_token_that_its_slot_accepted() -> None:
    futures = FutureTokens()
    recorded(futures, ints(4, 200, 1), [[7], [8, 9], []])
    tokens = ints(1, future(200), 2, future(4))
    assert futures.resolve(tokens).tolist() == [1, 9, 2, 7]
    assert tokens.tolist() == [1, -201, 2, -5]


def test_a_slot_that_accepts_nothing_keeps_its_token() -> None:
    futures = FutureTokens()
    recorded(futures, ints(3), [[7]])
    recorded(futures, ints(3), [[]])
    assert futures.resolve(ints(future(3))).tolist() == [7]


def test_a_future_of_a_failed_row_is_some_valid_token() -> None:
    futures = FutureTokens()
    recorded(futures, ints(3), [[]], failed=(0,))
    assert futures.resolve(ints(future(3))).tolist() == [0]


@pytest.mark.parametrize("slot", [5, 63])
def test_a_future_of_a_slot_that_never_sampled_is_our_bug(slot: int) -> None:
    with pytest.raises(AssertionError, match="sampled nothing"):
        FutureTokens().resolve(ints(future(slot)))


def test_rows_of_one_token_each_are_futures_as_any_others() -> None:
    futures = FutureTokens()
    slots, others = ints(3, 4), ints(4, 5)
    futures.record_each(slots, ints(7, 8))
    futures.record_each(slots, ints(9, 10))
    futures.record_each(others, ints(11, 12))
    assert futures.resolve(ints(future(3), future(4), future(5))).tolist() == [9, 11, 12]
    recorded(futures, ints(5), [[13]])
    futures.record_each(slots, ints(14, 15))
    tokens = ints(future(3), future(4), future(5))
    assert [futures.resolve(tokens).tolist() for _ in range(2)] == [[14, 15, 13]] * 2
