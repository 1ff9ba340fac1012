"""Looking through rows: for the greatest, and for what is not finite."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.rows import Row, rows_of

from antiphon.kernels.norm import finite_rows
from antiphon.kernels.sampling import argmax

GENERATOR = torch.Generator().manual_seed(0)
SIZES = (1, 15, 16, 17, 255, 256, 257, 301, 8192)


def each_row(op) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("row", rows_of(op), ids=lambda row: row.name)


@each_row(argmax)
@pytest.mark.parametrize("size", SIZES)
def test_greedy_takes_the_first_of_the_highest(row: Row, size: int) -> None:
    logits = torch.randint(-3, 4, (30, size), generator=GENERATOR).float()
    logits[1] = -torch.inf
    logits[2, size // 2] = torch.inf
    logits[3] = torch.arange(size)
    found = row(logits)
    for i, values in enumerate(logits.tolist()):
        assert int(found[i]) == values.index(max(values))


@each_row(argmax)
def test_a_row_with_a_nan_still_gives_a_token(row: Row) -> None:
    logits = torch.full((2, 20), torch.nan)
    logits[1, 3] = 1.0
    assert all(0 <= token < 20 for token in row(logits).tolist())


@each_row(finite_rows)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_rows_that_are_not_finite_are_told(row: Row, dtype: torch.dtype, size: int) -> None:
    values = torch.randn(5, size, generator=GENERATOR).to(dtype) * 1e30
    assert row(values) is None
    for i, bad in enumerate((torch.nan, torch.inf, -torch.inf)):
        values[i, size - 1 - i % size] = bad
    assert row(values).tolist() == [False, False, False, True, True]


@each_row(finite_rows)
def test_opposite_infinities_do_not_cancel(row: Row) -> None:
    values = torch.zeros(2, 40)
    values[0, 3], values[0, 30] = torch.inf, -torch.inf
    assert row(values).tolist() == [False, True]


@each_row(finite_rows)
def test_of_no_rows_all_are_finite(row: Row) -> None:
    assert row(torch.zeros(0, 8)) is None


@each_row(argmax)
def test_no_rows_give_no_tokens(row: Row) -> None:
    assert row(torch.zeros(0, 8)).shape == (0,)
