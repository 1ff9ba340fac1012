from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from antiphon.kernels.op import DeviceCapability
from antiphon.kernels.ops import select
from antiphon.kernels.sampling import CANDIDATES

draw = select(DeviceCapability("cpu")).sample


def distribution(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> np.ndarray:
    """What one row should be drawn from, one filter after the other, in float64 numpy."""
    scaled = logits.double().numpy() / temperature
    mass = np.exp(scaled - scaled.max())
    mass /= mass.sum()
    order = np.argsort(-mass, kind="stable")
    before = np.cumsum(mass[order]) - mass[order]
    kept = np.ones(len(mass), bool)
    kept[order[top_k or len(mass) :]] = False
    kept[order[before > top_p]] = False
    kept[mass < min_p * mass.max()] = False
    return np.where(kept, mass, 0) / mass[kept].sum()


def drawn(logits: Tensor, uniform: np.ndarray, *columns: float) -> np.ndarray:
    rows = len(uniform)
    temperature, top_k, top_p, min_p = columns
    return draw(
        logits.expand(rows, -1),
        torch.as_tensor(uniform),
        torch.full((rows,), temperature),
        torch.full((rows,), int(top_k)),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
    ).numpy()


CASES = [
    (1.0, 0, 1.0, 0.0),
    (0.5, 0, 1.0, 0.0),
    (1.0, 7, 1.0, 0.0),
    (1.0, 0, 0.6, 0.0),
    (2.0, 40, 0.9, 0.02),
    (1.0, 0, 1.0, 0.3),
    (30.0, 0, 0.95, 0.0),  # so flat that the candidates do not hold top-p
    (30.0, 700, 1.0, 0.0),  # more than the candidates
    (30.0, CANDIDATES, 1.0, 0.0),
    (1.0, 5000, 0.5, 0.0),
]


@pytest.mark.parametrize("vocabulary", [10, 256, 1000])
@pytest.mark.parametrize("columns", CASES, ids=str)
def test_tokens_are_drawn_as_often_as_the_filtered_softmax_says(vocabulary, columns) -> None:
    logits = 3 * torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    want = distribution(logits[0], *columns)
    # An even comb instead of random numbers: each token is hit as often as its share, to a count.
    comb = (np.arange(4000) + 0.5) / 4000
    got = np.bincount(drawn(logits, comb, *columns), minlength=vocabulary) / 4000
    np.testing.assert_allclose(got, want, atol=1.1 / 4000)


def test_numbers_run_through_the_vocabulary_in_order() -> None:
    logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(0))
    tokens = drawn(logits, np.linspace(0, 1, 500, endpoint=False), 1.0, 0, 0.8, 0.0)
    assert (np.diff(tokens) >= 0).all()


def test_the_ends_of_the_unit_interval_are_kept_tokens() -> None:
    logits = torch.full((1, 1000), -1000.0)
    logits[0, [300, 600]] = 0.0
    ends = np.array([0.0, 1 - 2.0**-52])
    assert drawn(logits, ends, 1.0, 0, 1.0, 0.0).tolist() == [300, 600]


@pytest.mark.parametrize("seed", range(5))
def test_a_row_does_not_depend_on_its_batch(seed: int) -> None:
    print("seed", seed)
    random = np.random.default_rng(seed)
    rows, vocabulary = 33, 1111
    logits = torch.as_tensor(random.normal(size=(rows, vocabulary)).astype(np.float32) * 2)
    columns = (
        torch.as_tensor(random.random(rows)),
        torch.as_tensor(random.uniform(0.1, 20, rows).astype(np.float32)),
        torch.as_tensor(random.choice([0, 3, 300], rows)),
        torch.as_tensor(random.choice([0.2, 0.9, 0.999, 1.0], rows).astype(np.float32)),
        torch.as_tensor(random.choice([0.0, 0.1], rows).astype(np.float32)),
    )
    together = draw(logits, *columns)
    order = torch.as_tensor(random.permutation(rows))
    shuffled = draw(logits[order], *(column[order] for column in columns))
    assert torch.equal(shuffled, together[order])
    for row in range(rows):
        one = slice(row, row + 1)
        assert draw(logits[one], *(column[one] for column in columns)) == together[row]


def test_a_row_that_is_not_finite_harms_no_other() -> None:
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(1))
    broken = logits.clone()
    broken[1] = torch.nan
    columns = (
        torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64),
        torch.ones(3),
        torch.tensor([0, 5, 0]),
        torch.tensor([0.9, 0.9, 1.0]),
        torch.zeros(3),
    )
    assert torch.equal(draw(broken, *columns)[[0, 2]], draw(logits, *columns)[[0, 2]])
