"""When requests are sent, and how an event stream becomes a timeline."""

from __future__ import annotations

import itertools
from statistics import mean
from typing import TYPE_CHECKING, Self

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.bench.serving.client import read_stream
from tests.bench.serving.datasets import Script
from tests.bench.serving.load import ClosedLoop, Poisson, parse_arrival, play
from tests.bench.serving.timeline import Piece, Timeline

if TYPE_CHECKING:
    from collections.abc import Sequence


class Echo:
    """Answers at once with the number of turns it received, and counts concurrent requests."""

    def __init__(self, *, fails: bool = False) -> None:
        self.asked: list[tuple[str, ...]] = []
        self._fails = fails

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None: ...

    async def ask(self, said: Sequence[str], output_tokens: int, due_s: float) -> Timeline:
        self.asked.append(tuple(said))
        return Timeline(
            due_s=due_s,
            sent_s=due_s,
            ended_s=due_s,
            pieces=(Piece(due_s, f"answer {len(said)}"),),
            output_tokens=output_tokens,
            error="no" if self._fails else None,
        )


CONVERSATION = Script(("hello", "and then", "goodbye"), 1, 8)


async def test_each_turn_brings_all_that_was_said_before() -> None:
    echo = Echo()
    seen = await play([CONVERSATION], ClosedLoop(1), echo)
    assert len(seen) == 3
    assert echo.asked[-1] == ("hello", "answer 1", "and then", "answer 3", "goodbye")


async def test_a_conversation_ends_at_its_first_error() -> None:
    seen = await play([CONVERSATION], ClosedLoop(1), Echo(fails=True))
    assert len(seen) == 1


@pytest.mark.parametrize("arrival", [ClosedLoop(1), ClosedLoop(3), ClosedLoop(64), Poisson(1e5)])
async def test_everything_is_asked_once(arrival: ClosedLoop | Poisson) -> None:
    echo = Echo()
    await play([Script((f"question {n}",), 2, 8) for n in range(20)], arrival, echo)
    assert sorted(echo.asked) == sorted((f"question {n}",) for n in range(20))


def test_arrivals_are_exponential_and_repeatable() -> None:
    times = list(itertools.islice(Poisson(4.0, seed=1).times_s(), 20_001))
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert times[0] == 0.0
    assert mean(gaps) == pytest.approx(0.25, rel=0.03)
    assert sum(gap > 0.25 for gap in gaps) / len(gaps) == pytest.approx(0.3679, abs=0.02)
    assert times == list(itertools.islice(Poisson(4.0, seed=1).times_s(), 20_001))


def test_an_arrival_is_read_as_it_is_written() -> None:
    for arrival in (ClosedLoop(16), Poisson(2.5, seed=3)):
        assert parse_arrival(str(arrival), seed=3) == arrival
    for text in ("closed:0", "closed:x", "poisson:-1", "often:3"):
        with pytest.raises(ValueError, match=r"neither|could not convert"):
            parse_arrival(text, seed=0)


STREAM = (
    b'data: {"choices":[{"text":"Hel"}]}\n\n'
    b'data: {"choices":[{"text":"lo"}]}\r\n\r\n'
    b": a comment\n\n"
    b'data: {"choices":[{"delta":{"content":" you"}}],"usage":null}\n\n'
    b'data: {"choices":[{"text":"","finish_reason":"length"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":3,'
    b'"prompt_tokens_details":{"cached_tokens":4}}}\n\n'
    b"data: [DONE]\n\n"
)


@given(st.sets(st.integers(1, len(STREAM) - 1)))
def test_a_stream_reads_the_same_however_it_was_cut(cuts: set[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    reads = [(float(b), STREAM[a:b]) for a, b in itertools.pairwise(edges)]
    timeline = read_stream(reads, due_s=0, sent_s=0, ended_s=999)
    assert [piece.text for piece in timeline.pieces] == ["Hel", "lo", " you"]
    assert (timeline.prompt_tokens, timeline.output_tokens, timeline.cached_tokens) == (5, 3, 4)
    assert timeline.error is None
    for piece, last in zip(
        timeline.pieces, (b'"Hel"}]}\n', b'"lo"}]}\r\n', b"null}\n"), strict=True
    ):
        complete = STREAM.index(last) + len(last)
        assert piece.at_s == min(edge for edge in edges if edge >= complete)


def test_an_error_in_a_stream_is_the_end_of_it() -> None:
    reads = [(1.0, b'data: {"choices":[{"text":"x"}]}\n\ndata: {"error":{"message":"gone"}}\n\n')]
    timeline = read_stream(reads, due_s=0, sent_s=0, ended_s=2)
    assert timeline.error is not None
    assert "gone" in timeline.error
