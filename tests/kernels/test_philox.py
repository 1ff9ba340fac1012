from __future__ import annotations

import numpy as np
import pytest

from antiphon.kernels.sampling import philox4x32, uniform

# kat_vectors of the authors' Random123 library: counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
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
    numbers = {
        draws(),
        draws(seed=6),
        draws(seed=5 + 2**32),
        draws(seed=-5),
        draws(choice=1),
        draws(position=10),
    }
    assert len(numbers) == 6


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
