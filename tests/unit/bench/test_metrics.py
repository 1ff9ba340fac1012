"""Figures of timelines that can be computed in the head."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.bench.serving.client import Piece, Timeline
from tests.bench.serving.metrics import Slo, e2e_ms, itl_ms, measure, spread, tpot_ms, ttft_ms


def words(text: str) -> int:
    """In these tests a token is a word."""
    return len(text.split())


def answered(sent_s: float, *pieces: tuple[float, str], ended_s: float, late_s: float = 0.0):
    """A request that was answered in these pieces, 10 tokens in."""
    return Timeline(
        due_s=sent_s - late_s,
        sent_s=sent_s,
        ended_s=ended_s,
        pieces=tuple(Piece(at_s, text) for at_s, text in pieces),
        prompt_tokens=10,
        output_tokens=sum(words(text) for _, text in pieces),
    )


FAST = answered(1.0, (1.5, "one"), (1.6, "two"), (1.8, "three four"), ended_s=1.8)
SLOW = answered(1.0, (3.0, "one"), (4.0, "two"), ended_s=5.0)
BROKEN = Timeline(due_s=0.0, sent_s=0.0, ended_s=9.0, error="503: full")


def test_the_times_of_one_request() -> None:
    assert ttft_ms(FAST) == pytest.approx(500)
    assert e2e_ms(FAST) == pytest.approx(800)
    assert tpot_ms(FAST) == pytest.approx(100)  # 300 ms for the three tokens after the first
    assert list(itl_ms(FAST, words)) == pytest.approx([100, 100, 100])


def test_a_piece_of_several_tokens_counts_as_so_many_equal_gaps() -> None:
    bursty = answered(0.0, (1.0, "one"), (2.0, "two three four five"), ended_s=2.0)
    assert list(itl_ms(bursty, words)) == pytest.approx([250] * 4)


def test_answers_of_one_token_and_of_none_have_the_times_that_are_left() -> None:
    assert tpot_ms(answered(0.0, (1.0, "one"), ended_s=1.0)) is None
    assert ttft_ms(answered(2.0, ended_s=3.0)) == pytest.approx(1000)


def test_a_run_in_numbers() -> None:
    metrics = measure([FAST, SLOW], words)
    assert metrics.duration_s == pytest.approx(4.0)  # from the first sent to the last ended
    assert metrics.output_tokens == 6
    assert metrics.output_tokens_per_s == pytest.approx(1.5)
    assert metrics.total_tokens_per_s == pytest.approx((20 + 6) / 4)
    assert metrics.prompt_tokens_per_s == pytest.approx(5.0)
    assert metrics.requests_per_s == pytest.approx(0.5)
    assert metrics.concurrency == pytest.approx((0.8 + 4.0) / 4)
    assert metrics.ttft_ms.mean == pytest.approx(1250)
    assert metrics.ttft_ms.max == pytest.approx(2000)
    assert metrics.goodput is None


def test_failed_requests_count_as_failed_and_nowhere_else() -> None:
    with_failure = measure([FAST, BROKEN, SLOW], words)
    without = measure([FAST, SLOW], words)
    assert (with_failure.requests, with_failure.failed) == (3, 1)
    assert with_failure.duration_s == without.duration_s
    assert with_failure.e2e_ms == without.e2e_ms
    assert with_failure.output_tokens_per_s == without.output_tokens_per_s


def test_nothing_answered_is_all_zero() -> None:
    metrics = measure([BROKEN], words, Slo(ttft_ms=1.0))
    assert (metrics.failed, metrics.duration_s, metrics.output_tokens_per_s) == (1, 0.0, 0.0)
    assert metrics.goodput == 0.0


@pytest.mark.parametrize(
    ("slo", "kept"),
    [
        (Slo(), 2),
        (Slo(ttft_ms=600), 1),
        (Slo(ttft_ms=2000, tpot_ms=150), 1),
        (Slo(e2e_ms=4000), 2),
        (Slo(e2e_ms=799), 0),
    ],
)
def test_goodput_counts_who_kept_every_promise(slo: Slo, kept: int) -> None:
    assert measure([FAST, SLOW], words, slo).goodput == pytest.approx(kept / 4.0)


def test_what_the_cache_saved_is_unknown_until_somebody_says() -> None:
    said = Timeline(due_s=0, sent_s=0, ended_s=1, prompt_tokens=10, cached_tokens=8)
    assert measure([FAST], words).cached_tokens is None
    assert measure([FAST, said], words).cached_tokens == 8


def test_a_slow_load_generator_gives_itself_away() -> None:
    late = answered(1.0, (1.5, "one"), ended_s=1.5, late_s=0.25)
    assert measure([FAST, late], words).late_ms_max == pytest.approx(250)


def test_percentiles_are_interpolated() -> None:
    hundred = spread(range(101))
    assert (hundred.p50, hundred.p90, hundred.p95, hundred.p99) == (50, 90, 95, 99)
    assert spread([1.0, 2.0]).p50 == pytest.approx(1.5)
    assert spread([]).max == 0.0


@given(st.lists(st.floats(0.001, 1.0), min_size=2, max_size=20))
def test_gaps_add_up_to_the_time_after_the_first_token(gaps: list[float]) -> None:
    at_s = [sum(gaps[: n + 1]) for n in range(len(gaps))]
    timeline = answered(0.0, *((each, "word") for each in at_s), ended_s=at_s[-1])
    seen = list(itl_ms(timeline, words))
    assert seen == pytest.approx([1000 * (b - a) for a, b in pairwise(at_s)])
    assert sum(seen) / (len(gaps) - 1) == pytest.approx(tpot_ms(timeline))
