"""Figures of timelines that can be computed in the head, summaries of runs, and perplexities."""

from __future__ import annotations

import hashlib
import json
import math
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.bench.machine import Machine
from tests.bench.prose import FILE, PROSE, WINDOW, WINDOWS, perplexity, perplexity_of, windows
from tests.bench.serving.client import Piece, Timeline
from tests.bench.serving.metrics import Slo, e2e_ms, itl_ms, measure, spread, tpot_ms, ttft_ms
from tests.bench.summary import RAW, RESULTS, Summary, measured, read, single, write, write_results

from antiphon.model_card.packaged import packaged

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor


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


def test_what_the_cache_saved_is_unknown_until_a_reply_has_it() -> None:
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


MACHINE = Machine("abc", "cpu", 2, 0.0)
LINES_MAX = 4_000
"""Of all files in git."""


def test_percentiles_are_given_from_five_values_on() -> None:
    row = measured("ms", [1.0, 2.0, 3.0, 4.0, 6.0])
    assert (row.n, row.median, row.min, row.max) == (5, 3.0, 1.0, 6.0)
    assert (row.p10, row.p90) == pytest.approx((1.4, 5.2))
    few = measured("ms", [1.0, 2.0, 3.0, 4.0])
    assert (few.n, few.median, few.p10, few.p90) == (4, 2.5, None, None)


def test_one_value_is_no_distribution() -> None:
    row = measured("ms", [None, 7.0], by_round=True)
    assert (row.n, row.value, row.median, row.by_round) == (1, 7.0, None, ())
    assert (row.middle, row.least, row.most) == (7.0, 7.0, 7.0)


def test_a_round_without_a_value_keeps_its_place() -> None:
    row = measured("ratio", [1.0, None, 2.0], against="other", by_round=True)
    assert (row.n, row.median, row.by_round) == (2, 1.5, (1.0, None, 2.0))


def test_summary_has_a_row_a_line_and_is_read_as_written(tmp_path: Path) -> None:
    rows = (measured("ms", [1.0, 2.0], case="a", arm="x"), single("count", 3, case="b"))
    summary = Summary(section="s", machine=MACHINE, notes=("disturbed",), rows=rows)
    write_results(tmp_path / "s.json", MACHINE, summary)
    assert read(tmp_path / "s.json") == summary
    lines = (tmp_path / "s.json").read_text().splitlines()
    found = [json.loads(line.rstrip(",")) for line in lines if "quantity" in line]
    assert [row["quantity"] for row in found] == ["ms", "count"]
    assert json.loads((tmp_path / RAW / "s.json").read_text())["commit"] == "abc"


def test_row_is_found_by_quantity_case_and_arm() -> None:
    ratio = measured("ms", [0.5, 0.6], case="a", arm="x", against="y")
    rows = (single("ms", 1, case="a", arm="x"), single("ms", 2, case="a", arm="y"), ratio)
    summary = Summary(section="s", machine=MACHINE, rows=rows)
    assert summary.row("ms", case="a", arm="y").middle == 2
    assert summary.row("ms", ratio=True) is ratio
    assert summary.find("ms", case="b") is None
    assert (summary.cases(), summary.arms("ms")) == (["a"], ["x", "y"])


def test_results_in_git_are_summaries(tmp_path: Path) -> None:
    files = sorted(RESULTS.glob("*.json"))
    assert sum(len(file.read_text().splitlines()) for file in files) < LINES_MAX
    for file in files:
        write(read(file), tmp_path / file.name)
        assert (tmp_path / file.name).read_text() == file.read_text(), file.name


PROSE_SHA256 = "7f6e256410627120f85ae5f40de5646162c665fe4cc08d5c49542c471e7c7f12"


def test_perplexity_of_a_guess_among_all_tokens_is_their_number() -> None:
    found = perplexity(lambda ids: torch.zeros(len(ids), 50), [[1, 2, 3], [4, 5]])
    assert found == pytest.approx(50)


def test_perplexity_scores_each_token_by_the_logits_before_it() -> None:
    def foretold(ids: Sequence[int]) -> Tensor:
        logits = torch.full((len(ids), 10), -50.0)
        for at, token in enumerate(ids[1:]):
            logits[at, token] = 50.0
        return logits

    assert perplexity(foretold, [[3, 1, 4], [1, 5]]) == pytest.approx(1)
    shifted = perplexity(lambda ids: foretold(ids).roll(1, 0), [[3, 1, 4, 1, 5]])
    assert shifted > math.e


def test_windows_are_the_first_tokens_of_the_text() -> None:
    ids = list(range(WINDOW * WINDOWS + 7))
    assert [token for window in windows(ids) for token in window] == ids[:-7]
    with pytest.raises(AssertionError, match="the text has 5 tokens"):
        windows(ids[:5])


def test_committed_perplexities_are_of_the_pinned_text_and_file() -> None:
    setup = read(FILE).setup
    wheel = packaged(str(setup["model"]))
    assert wheel is not None
    assert setup["file_sha256"] == wheel.member_sha256
    found = hashlib.sha256(PROSE.read_bytes()).hexdigest()
    assert found == PROSE_SHA256, "measure again: the text is another"


def test_committed_perplexities_are_those_of_transformers() -> None:
    summary = read(FILE)
    assert summary.setup["tokens"] == WINDOW * WINDOWS
    assert abs(summary.row("change", arm="antiphon, float32").middle) < 1e-5
    assert abs(summary.row("change", arm="antiphon, bfloat16").middle) < 0.01


def test_committed_perplexities_are_within_one_percent_of_those_of_llama_cpp() -> None:
    summary = read(FILE)
    _, _, ours, theirs = summary.arms("perplexity")
    assert (ours, theirs.partition(",")[0]) == ("antiphon, bfloat16", "llama.cpp")
    found, wanted = (summary.row("perplexity", arm=arm).middle for arm in (ours, theirs))
    assert abs(found / wanted - 1) < 0.01
    assert "dirty" not in summary.machine.commit


def test_losses_of_another_reader_are_summed_up_over_the_same_tokens() -> None:
    losses = [[math.log(7)] * (WINDOW - 1)] * WINDOWS
    assert perplexity_of(losses) == pytest.approx(7)
    for other in (losses[1:], [*losses[1:], losses[0][1:]]):
        with pytest.raises(ValueError, match="of 4 windows"):
            perplexity_of(other)
