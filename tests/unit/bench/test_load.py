"""The load generator: what is sent and when, over HTTP and NATS, and how streams are read."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from contextlib import asynccontextmanager
from statistics import mean
from typing import TYPE_CHECKING, Self

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st
from tests.bench.machine import Device
from tests.bench.models import LLAMA_135M, SHAPES, Model, train_tokenizer
from tests.bench.serving.__main__ import _arguments, _run_all
from tests.bench.serving.client import HttpTarget, NatsTarget, Piece, Timeline, read_stream
from tests.bench.serving.load import (
    ClosedLoop,
    MultiTurn,
    Poisson,
    RandomLengths,
    Script,
    SharedPrefix,
    Vocabulary,
    parse_arrival,
    parse_dataset,
    play,
)
from tests.bench.serving.metrics import Slo
from tests.bench.serving.report import Run, drawn, summarize
from tests.bench.summary import RAW, read, report, table
from tests.support.memory_bus import MemoryBroker, MemoryTransport
from tests.support.services import CLUSTER
from tests.unit.client.gateway import MODEL, USAGE, FakeGateway, gateway
from tokenizers import Tokenizer

from antiphon.client import Client
from antiphon.wire.errors import Overloaded

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence
    from pathlib import Path


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = [f"{a}{b}{c}" for a in "bdfgklmn" for b in "aeiou" for c in "lmnrst"]
    where = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([" ".join(names)] * 3, size=1500).save(str(where / "tokenizer.json"))
    return where


@pytest.fixture(scope="session")
def words(folder: Path) -> Vocabulary:
    return Vocabulary(folder)


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
    timeline = read_stream(reads, Timeline(due_s=0, sent_s=0, ended_s=999))
    assert [piece.text for piece in timeline.pieces] == ["Hel", "lo", " you"]
    assert (timeline.prompt_tokens, timeline.output_tokens, timeline.cached_tokens) == (5, 3, 4)
    assert timeline.error is None
    ends = (b'"Hel"}]}\n', b'"lo"}]}\r\n', b"null}\n")
    for piece, last in zip(timeline.pieces, ends, strict=True):
        complete = STREAM.index(last) + len(last)
        assert piece.at_s == min(edge for edge in edges if edge >= complete)


def test_an_error_in_a_stream_is_the_end_of_it() -> None:
    reads = [(1.0, b'data: {"choices":[{"text":"x"}]}\n\ndata: {"error":{"message":"gone"}}\n\n')]
    timeline = read_stream(reads, Timeline(due_s=0, sent_s=0, ended_s=2))
    assert timeline.error is not None
    assert "gone" in timeline.error


def test_random_prompts_have_their_length_and_nothing_in_common(words: Vocabulary) -> None:
    scripts = RandomLengths(128, 32).scripts(words, 20, seed=1)
    assert {words.tokens(script.turns[0]) for script in scripts} == {128}
    assert {script.output_tokens for script in scripts} == {32}
    assert len({script.turns[0][:24] for script in scripts}) == 20


def test_lengths_spread_between_a_share_of_the_longest_and_the_longest(words: Vocabulary) -> None:
    scripts = RandomLengths(100, 40, spread=0.5).scripts(words, 200, seed=2)
    assert {words.tokens(s.turns[0]) for s in scripts} == {s.prompt_tokens for s in scripts}
    assert 50 <= min(s.prompt_tokens for s in scripts) < 60
    assert 90 < max(s.prompt_tokens for s in scripts) <= 100
    assert min(s.output_tokens for s in scripts) >= 20


def test_prompts_of_a_group_share_exactly_the_prefix(folder: Path, words: Vocabulary) -> None:
    dataset = SharedPrefix(96, 16, 8, groups=2)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [tokenizer.encode(s.turns[0]).ids for s in dataset.scripts(words, 8, seed=3)]
    assert {len(each) for each in ids} == {dataset.prompt_tokens} == {112}
    assert len({tuple(each[:96]) for each in ids}) == 2
    assert ids[0][:96] == ids[2][:96] != ids[1][:96]
    assert len({tuple(each[96:]) for each in ids}) == 8


def test_conversations_have_their_turns(words: Vocabulary) -> None:
    scripts = MultiTurn(4, 20, 16).scripts(words, 3, seed=4)
    assert [len(script.turns) for script in scripts] == [4, 4, 4]
    assert {words.tokens(turn) for script in scripts for turn in script.turns} == {20}


def test_a_seed_gives_the_same_prompts_and_another_gives_others(words: Vocabulary) -> None:
    dataset = RandomLengths(64, 8)
    assert dataset.scripts(words, 5, seed=5) == dataset.scripts(words, 5, seed=5)
    assert dataset.scripts(words, 5, seed=5) != dataset.scripts(words, 5, seed=6)


@pytest.mark.parametrize(
    ("text", "dataset"),
    [
        ("random:128:64", RandomLengths(128, 64)),
        ("random:128:64:0.5", RandomLengths(128, 64, 0.5)),
        ("shared:768:32:32", SharedPrefix(768, 32, 32)),
        ("shared:768:32:32:4", SharedPrefix(768, 32, 32, 4)),
        ("turns:4:64:32", MultiTurn(4, 64, 32)),
        ("long:3000", RandomLengths(3000, 16)),
    ],
)
def test_a_dataset_is_read_as_it_is_written(text: str, dataset: object) -> None:
    assert parse_dataset(text) == dataset


@pytest.mark.parametrize("text", ["", "random", "random:128", "poem:3", "random:a:b"])
def test_what_is_no_dataset_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"none of|could not convert"):
        parse_dataset(text)


def test_the_shapes_weigh_what_they_are_called() -> None:
    llama, qwen = SHAPES["llama-135m"], SHAPES["qwen2.5-0.5b"]
    assert llama.weights_count == 110_886_912  # 135 M with the vocabulary of the original
    assert qwen.weights_count == 365_166_592
    assert (llama.kv_bytes, qwen.kv_bytes) == (30 * 2 * 192 * 2, 24 * 2 * 128 * 2)


GAP_S = 0.005


class OpenAi:
    """Streams `max_tokens` words, one each `GAP_S`, and records its requests."""

    def __init__(self, words: Vocabulary) -> None:
        self.asked: list[dict[str, object]] = []
        self.refuses = False
        self._words = words

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        if self.refuses:
            return web.json_response({"error": {"message": "full"}}, status=503)
        prompt = body.get("prompt") or "".join(turn["content"] for turn in body["messages"])
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(body["max_tokens"]):
            await asyncio.sleep(GAP_S)
            choice = {"text": " bam"} if "prompt" in body else {"delta": {"content": " bam"}}
            await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        prompt_tokens = self._words.tokens(prompt)
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": body["max_tokens"]}
        last = json.dumps({"choices": [], "usage": usage}).encode()
        await response.write(b"data: " + last + b"\n\ndata: [DONE]\n\n")
        return response


@pytest.fixture
async def openai(words: Vocabulary) -> AsyncGenerator[tuple[OpenAi, str]]:
    fake = OpenAi(words)
    app = web.Application()
    paths = ("/v1/completions", "/v1/chat/completions")
    app.add_routes([web.post(path, fake.complete) for path in paths])
    async with TestServer(app) as server:
        yield fake, str(server.make_url("")).rstrip("/")


async def test_what_a_server_says_is_what_is_seen(
    openai: tuple[OpenAi, str], words: Vocabulary
) -> None:
    fake, url = openai
    scripts = RandomLengths(20, 8).scripts(words, 6, seed=1)
    async with HttpTarget(url, "m") as target:
        seen = await play(scripts, ClosedLoop(3), target)
    assert [(t.prompt_tokens, t.output_tokens, t.text) for t in seen] == [(20, 8, " bam" * 8)] * 6
    assert all(t.ended_s - t.sent_s >= 8 * GAP_S for t in seen)
    assert {body["prompt"] for body in fake.asked} == {script.turns[0] for script in scripts}
    assert all(body["ignore_eos"] and body["temperature"] == 0 for body in fake.asked)


async def test_a_refusal_is_a_failed_request_with_its_reason(
    openai: tuple[OpenAi, str], words: Vocabulary
) -> None:
    fake, url = openai
    fake.refuses = True
    async with HttpTarget(url, "m", ignore_eos=False, more={"temperature": 1.0}) as target:
        (seen,) = await play(RandomLengths(5, 4).scripts(words, 1, 2), ClosedLoop(1), target)
    assert seen.error is not None
    assert "503" in seen.error
    assert "full" in seen.error
    assert "ignore_eos" not in fake.asked[0]
    assert fake.asked[0]["temperature"] == 1.0


async def test_a_connection_that_is_refused_is_a_failed_request(words: Vocabulary) -> None:
    async with HttpTarget("http://127.0.0.1:9", "m") as target:
        (seen,) = await play(RandomLengths(5, 4).scripts(words, 1, 2), ClosedLoop(1), target)
    assert seen.error is not None


async def test_the_command_measures_and_writes_what_it_measured(
    openai: tuple[OpenAi, str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, url = openai
    given = "--arrival closed:2 poisson:200 --dataset turns:2:6:4 --requests 5 --slo ttft=900"
    monkeypatch.setattr(sys, "argv", ["bench-serving", "--chat", *given.split()])
    target = HttpTarget(url, "m", chat=True)
    runs = await _run_all(_arguments(), Model(LLAMA_135M, folder), target, "chat", None)
    assert [run.name for run in runs] == ["closed:2", "poisson:200"]
    for run in runs:
        assert (run.metrics.requests, run.metrics.failed) == (10, 0)
        assert run.metrics.output_tokens == 40
        assert run.metrics.goodput == pytest.approx(run.metrics.requests_per_s)
    assert len({json.dumps(body["messages"]) for body in fake.asked}) == len(fake.asked)

    summary = summarize(runs, Device(30.0, 400.0), "m")
    report(summary, tmp_path / "result.json", runs)
    raw = (tmp_path / RAW / "result.json").read_bytes()
    assert msgspec.json.decode(raw, type=list[Run]) == runs
    assert read(tmp_path / "result.json") == summary
    assert table(summary).row_count == len(summary.rows)
    assert summary.cases() == ["closed:2", "poisson:200"]
    assert all(run.slo == Slo(ttft_ms=900) for run in runs)
    chart = drawn(summary)
    assert all(f">{name} {each}<" in chart for name in ("TTFT", "ITL") for each in ("p50", "p99"))


@asynccontextmanager
async def over_nats(
    *script: str, whole: bool = False
) -> AsyncGenerator[tuple[FakeGateway, NatsTarget]]:
    broker = MemoryBroker()
    client = Client(MemoryTransport(broker), cluster=CLUSTER)
    async with (
        gateway(broker, script=script) as fake,
        NatsTarget(client, MODEL, whole=whole) as target,
    ):
        yield fake, target


async def test_over_nats_times_and_text_are_seen(words: Vocabulary) -> None:
    scripts = RandomLengths(5, 3).scripts(words, 4, seed=3)
    async with over_nats("a", "b", "c") as (fake, target):
        seen = await play(scripts, ClosedLoop(2), target)
    assert [(t.text, t.output_tokens, t.error) for t in seen] == [("abc", 3, None)] * 4
    assert all(request.request.ignore_eos for request in fake.requests)


async def test_over_nats_a_whole_answer_has_what_the_server_counts(words: Vocabulary) -> None:
    scripts = RandomLengths(5, 3).scripts(words, 1, seed=4)
    async with over_nats("abc", whole=True) as (fake, target):
        (seen,) = await play(scripts, ClosedLoop(1), target)
        fake.refuses = Overloaded("full")
        (refused,) = await play(scripts, ClosedLoop(1), target)
    assert seen.prompt_tokens == USAGE.prompt_tokens
    assert (seen.output_tokens, seen.cached_tokens) == (USAGE.completion_tokens, 0)
    assert refused.error == "overloaded: full"
