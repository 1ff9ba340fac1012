"""Random numbers as a function of where they are used, not of earlier samples.

A counter-based generator has no state: the number for (seed, choice, position, purpose) is the
same whatever else is in the batch, on every worker, before and after a migration.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", Philox 4x32 with ten
rounds; the tests contain its published vectors.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_ROUNDS = 10

Words = NDArray[np.uint64]


class Purpose(IntEnum):
    """What a number is used for. Two uses at one position never share a number."""

    SAMPLE = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def uniform(
    seed: NDArray[np.int64],
    choice: NDArray[np.int32],
    position: NDArray[np.int64],
    purpose: Purpose,
) -> NDArray[np.float64]:
    """One number in [0, 1) a row, with 52 random bits.

    seed, choice, position (L,): position is the index in its sequence of the token being sampled.
    52 bits, not 53: then the product with any sum is below that sum, after rounding too.
    """
    bits = seed.view(np.uint64)
    zeros = np.zeros_like(bits)
    counter = (
        position.astype(np.uint64) & _LOW,
        choice.astype(np.uint64) & _LOW,
        zeros + np.uint64(purpose),
        zeros,
    )
    first, second, _, _ = philox4x32(counter, (bits & _LOW, bits >> _HALF))
    mantissa = ((first >> np.uint64(6)) << np.uint64(26)) | (second >> np.uint64(6))
    return mantissa.astype(np.float64) * 2.0**-52


def philox4x32(
    counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]
) -> tuple[Words, Words, Words, Words]:
    """Ten rounds of Philox over 32-bit words, each held in the low half of a uint64."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        left, right = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b, c, d = (right >> _HALF) ^ b ^ k0, right & _LOW, (left >> _HALF) ^ d ^ k1, left & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return a, b, c, d
