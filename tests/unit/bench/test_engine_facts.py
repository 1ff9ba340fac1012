"""What is concluded from runs with and without the cache, and beside a queue."""

from __future__ import annotations

import msgspec
import pytest
from tests.bench.serving import radix, waiting
from tests.bench.serving.metrics import measure
from tests.bench.serving.report import Run
from tests.bench.serving.timeline import Piece, Timeline


def one(_: str) -> int:
    return 1


def steady(first_s: float, gap_s: float, tokens: int = 400) -> Timeline:
    """An answer with a token each `gap_s`."""
    pieces = tuple(Piece(first_s + n * gap_s, "x") for n in range(tokens))
    end_s = pieces[-1].at_s
    return Timeline(due_s=0, sent_s=0, ended_s=end_s, pieces=pieces, output_tokens=tokens)


def test_the_rate_of_decode_is_that_of_all_while_all_are_in_the_window() -> None:
    began_s, rate = waiting.decode_rate([steady(1.0, 0.1), steady(2.0, 0.1)], one)
    assert began_s == pytest.approx(2.0 + 0.1 * waiting.WINDOW[0])
    assert rate == pytest.approx(20.0, rel=0.01)


def test_a_slow_start_does_not_count() -> None:
    """Whoever was held up before the window decodes as fast as ever in it."""
    prompt, held_up = steady(1.0, 0.05), steady(9.0, 0.05)
    assert waiting.decode_rate([prompt] * 4, one)[1] == pytest.approx(80.0, rel=0.02)
    assert waiting.decode_rate([held_up] * 4, one)[1] == pytest.approx(80.0, rel=0.02)


def test_text_that_comes_in_lumps_counts_its_tokens() -> None:
    timeline = steady(1.0, 0.1, tokens=200)
    lumps = tuple(Piece(piece.at_s, "x y") for piece in timeline.pieces)
    timeline = msgspec.structs.replace(timeline, pieces=lumps, output_tokens=400)
    _, rate = waiting.decode_rate([timeline], lambda text: len(text.split()))
    assert rate == pytest.approx(20.0, rel=0.03)


def run(name: str, took_s: float, cached_tokens: int) -> Run:
    """32 prompts of 800 tokens."""
    timelines = [
        Timeline(
            due_s=0,
            sent_s=0,
            ended_s=took_s,
            prompt_tokens=800,
            output_tokens=1,
            cached_tokens=cached_tokens if n else 0,
        )
        for n in range(radix.REQUESTS)
    ]
    metrics = measure(timelines, one)
    return Run(name=name, dataset="", arrival="", over="nats", seed=0, metrics=metrics)


def test_the_hit_rate_is_held_against_the_one_that_follows_from_the_prompts() -> None:
    runs = [run("cached 0", 2.0, 768), run("not cached 0", 16.0, 0)]
    facts = radix.facts(runs)
    assert facts["times_faster"] == pytest.approx(8.0)
    assert facts["hit_rate"] == facts["hit_rate_computed"] == pytest.approx(31 * 768 / (32 * 800))
    assert facts["hit_rate_without_cache"] == 0.0
