"""Buckets: never more than the burst and the rate, however guesses are corrected."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.gateway.access.limits import BucketCharge, RetryAfter, TokenBucket

BURST, RATE = 100.0, 3.0
ROUNDING = 1e-6


@dataclass
class Taken:
    """An admitted charge, with its cost as it came to be."""

    at: float
    cost: float
    charge: BucketCharge


def level_of(taken: list[Taken], now: float) -> float:
    """Play a plain bucket through, with each cost as it came to be."""
    level, at = BURST, 0.0
    for each in taken:
        level = min(BURST, level + RATE * (each.at - at)) - each.cost
        at = each.at
    return min(BURST, level + RATE * (now - at))


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("wait"), st.floats(0, 60)),
        st.tuples(st.just("take"), st.floats(0, BURST)),
        st.tuples(st.just("guess"), st.floats(0, BURST)),
        st.tuples(st.just("correct"), st.tuples(st.integers(0, 5), st.floats(0, 1))),
    ),
    max_size=60,
)


def play(steps: list[tuple[str, object]], *, overruns: bool) -> tuple[list[Taken], TokenBucket]:
    """Let in what may come in; after each step the bucket holds what it would if all was known."""
    bucket, now = TokenBucket(RATE, BURST, 0.0), 0.0
    taken: list[Taken] = []
    for kind, value in steps:
        if kind == "wait":
            assert isinstance(value, float)
            now += value
        elif kind == "correct":
            assert isinstance(value, tuple)
            open_ = [each for each in taken if each.charge.estimated]
            if open_:
                chosen = open_[value[0] % len(open_)]
                chosen.cost *= value[1] * (2 if overruns else 1)
                bucket.correct(chosen.charge, chosen.cost)
        else:
            assert isinstance(value, float)
            charge = bucket.take(value, now, estimated=kind == "guess")
            if isinstance(charge, BucketCharge):
                taken.append(Taken(now, value, charge))
        assert bucket.level(now) == pytest.approx(level_of(taken, now), abs=ROUNDING)
    return taken, bucket


@given(STEPS)
def test_in_any_time_no_more_is_let_in_than_the_burst_and_the_rate(
    steps: list[tuple[str, object]],
) -> None:
    taken, _ = play(steps, overruns=False)
    for first in range(len(taken)):
        used = 0.0
        for each in taken[first:]:
            used += each.cost
            assert used <= BURST + RATE * (each.at - taken[first].at) + ROUNDING


@given(STEPS)
def test_what_exceeds_its_guess_is_owed(steps: list[tuple[str, object]]) -> None:
    play(steps, overruns=True)


@given(STEPS)
def test_refused_charge_is_admitted_after_retry_after(
    steps: list[tuple[str, object]],
) -> None:
    _, bucket = play(steps, overruns=False)
    now = sum(value for kind, value in steps if kind == "wait" and isinstance(value, float))
    later = bucket.take(BURST, now)
    if isinstance(later, RetryAfter):
        assert isinstance(bucket.take(BURST - ROUNDING, now + later.after_s), BucketCharge)


@given(STEPS)
def test_the_history_is_no_longer_than_what_is_open(steps: list[tuple[str, object]]) -> None:
    taken, bucket = play(steps, overruns=False)
    guesses = sum(each.charge.estimated for each in taken)
    assert len(bucket._history) <= 2 * guesses


def test_a_bucket_that_has_filled_meanwhile_is_not_filled_twice() -> None:
    bucket = TokenBucket(RATE, BURST, 0.0)
    guess = bucket.take(50.0, 0.0, estimated=True)
    assert isinstance(guess, BucketCharge)
    assert bucket.level(1000.0) == BURST
    assert isinstance(bucket.take(BURST, 1000.0), BucketCharge)
    bucket.correct(guess, 0.0)
    assert bucket.level(1000.0) == 0.0


def test_what_was_not_used_comes_back() -> None:
    bucket = TokenBucket(RATE, BURST, 0.0)
    guess = bucket.take(BURST, 0.0, estimated=True)
    assert isinstance(guess, BucketCharge)
    assert bucket.take(1.0, 0.0) == RetryAfter(1.0 / RATE)
    bucket.correct(guess, 10.0)
    assert bucket.level(0.0) == BURST - 10.0
