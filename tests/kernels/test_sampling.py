from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from antiphon.kernels.op import DeviceCapability
from antiphon.kernels.ops import select
from antiphon.kernels.sampling import CANDIDATES, philox4x32, uniform

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
def test_tokens_are_drawn_with_the_shares_of_the_filtered_softmax(vocabulary, columns) -> None:
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


# kat_vectors of the authors' Random123 library: counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def word(value: int) -> np.ndarray:
    return np.array([value], np.uint64)


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_philox_gives_the_published_vectors(counter, key, result) -> None:
    a, b, c, d = map(word, counter)
    k0, k1 = map(word, key)
    assert [int(got[0]) for got in philox4x32((a, b, c, d), (k0, k1))] == list(result)


def draws(seed: int = 5, choice: int = 0, position: int = 9):
    return uniform(np.array([seed]), np.array([choice], np.int32), np.array([position]))[0]


def test_each_coordinate_changes_the_number() -> None:
    seeds = {draws(seed=seed) for seed in (5, 6, 5 + 2**32, -5)}
    assert len(seeds | {draws(choice=1), draws(position=10)}) == 6


def test_a_row_gets_the_same_number_in_any_batch() -> None:
    positions = np.arange(100)
    seeds, choices = np.full(100, 5, np.int64), np.zeros(100, np.int32)
    assert uniform(seeds, choices, positions)[9] == draws(position=9)


def test_numbers_are_spread_evenly_below_one() -> None:
    count = 100_000
    numbers = uniform(np.zeros(count, np.int64), np.zeros(count, np.int32), np.arange(count))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    shares = np.histogram(numbers, bins=20, range=(0, 1))[0] / count
    assert np.abs(shares - 0.05).max() < 0.004  # 6 standard deviations


OPS = select(DeviceCapability("cpu"))
VOCABULARY = 70

PENALTY = st.floats(-2, 2, width=32)
REPETITION = st.floats(0.5, 2, width=32)
OUTPUTS = st.lists(st.integers(0, VOCABULARY - 1), max_size=40)
LOGITS = st.integers(0, 2**32 - 1).map(
    lambda seed: torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed))
)


def naive(
    row: torch.Tensor, outputs: list[int], frequency: float, presence: float, repetition: float
) -> list[float]:
    """One token after the other, as it is said in words."""
    logits = row.tolist()
    for token, count in Counter(outputs).items():
        logits[token] -= frequency * count
        logits[token] -= presence
        logits[token] *= 1 / repetition if logits[token] > 0 else repetition
    return logits


@given(st.lists(st.tuples(LOGITS, OUTPUTS, PENALTY, PENALTY, REPETITION), min_size=1, max_size=5))
def test_penalties_lower_what_was_drawn_before(rows) -> None:
    logits = torch.stack([row for row, *_ in rows])
    entries = [
        (index, token, count, frequency, presence, repetition)
        for index, (_, outputs, frequency, presence, repetition) in enumerate(rows)
        for token, count in Counter(outputs).items()
    ]
    columns = [torch.tensor([entry[n] for entry in entries]) for n in range(6)]
    OPS.penalize(logits, columns[0].long(), columns[1].long(), *(c.float() for c in columns[2:]))
    expected = [naive(row, *others) for row, *others in rows]
    np.testing.assert_allclose(logits.numpy(), expected, atol=1e-4)


@given(st.integers(1, 100), st.integers(0, 2**32 - 1))
def test_a_mask_forbids_each_token_whose_bit_is_not_set(vocabulary: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    logits = torch.randn(6, vocabulary, generator=torch.Generator().manual_seed(seed))
    rows = np.sort(random.permutation(6)[: random.integers(1, 7)])
    allowed = random.random((len(rows), vocabulary)) < 0.5
    words = np.zeros((len(rows), -(-vocabulary // 32)), np.uint32)
    for row, token in np.argwhere(allowed):
        words[row, token // 32] |= np.uint32(1 << token % 32)
    expected = logits.clone()
    expected[torch.as_tensor(rows)] = torch.where(
        torch.as_tensor(allowed), logits[torch.as_tensor(rows)], -torch.inf
    )
    OPS.mask(logits, torch.as_tensor(rows), torch.as_tensor(words.view(np.int32)))
    assert torch.equal(logits, expected)


def test_a_bias_is_added_and_minus_infinity_forbids() -> None:
    logits = torch.zeros(3, 5)
    rows, tokens = torch.tensor([0, 2, 2]), torch.tensor([4, 0, 1])
    OPS.bias(logits, rows, tokens, torch.tensor([1.5, -2.0, -torch.inf]))
    assert logits.tolist() == [[0, 0, 0, 0, 1.5], [0] * 5, [-2.0, -torch.inf, 0, 0, 0]]


@given(st.integers(0, 2**32 - 1), st.floats(0.0625, 10, width=32))
def test_a_scaled_logit_less_the_log_mass_is_its_log_probability(seed: int, warmth: float) -> None:
    logits = 4 * torch.randn(3, 500, generator=torch.Generator().manual_seed(seed))
    logits[1, 7:] = -torch.inf
    temperature = torch.tensor([warmth, 1.0, warmth])
    mass = OPS.logsumexp(logits, temperature)
    got = logits / temperature[:, None] - mass[:, None]
    expected = torch.log_softmax(logits.double() / temperature.double()[:, None], dim=-1)
    np.testing.assert_allclose(got.numpy(), expected.numpy(), atol=3e-5, rtol=1e-5)


def test_a_row_s_log_mass_does_not_depend_on_its_batch() -> None:
    logits = 5 * torch.randn(64, 5000, generator=torch.Generator().manual_seed(2))
    temperature = torch.linspace(0.3, 2.0, 64)
    together = OPS.logsumexp(logits, temperature)
    for row in range(64):
        one = slice(row, row + 1)
        assert torch.equal(OPS.logsumexp(logits[one], temperature[one]), together[one])
