"""The load generator against servers that are known to the millisecond: over HTTP and NATS."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tests.bench.machine import Device
from tests.bench.models import LLAMA_135M, Model
from tests.bench.serving.__main__ import _arguments, _run_all
from tests.bench.serving.client import HttpTarget, NatsTarget, WholeNatsTarget
from tests.bench.serving.load import ClosedLoop, RandomLengths, Vocabulary, play
from tests.bench.serving.metrics import Slo
from tests.bench.serving.report import Run, drawn, summarize
from tests.bench.summary import RAW, read, report, table
from tests.support.memory_bus import MemoryBroker, MemoryTransport
from tests.support.services import CLUSTER
from tests.unit.client.gateway import MODEL, USAGE, gateway

from antiphon.client import Client
from antiphon.wire.errors import Overloaded

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

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
        usage = {
            "prompt_tokens": self._words.tokens(prompt),
            "completion_tokens": body["max_tokens"],
        }
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


async def test_nobody_at_the_door_is_a_failed_request(words: Vocabulary) -> None:
    async with HttpTarget("http://127.0.0.1:9", "m") as target:
        (seen,) = await play(RandomLengths(5, 4).scripts(words, 1, 2), ClosedLoop(1), target)
    assert seen.error is not None


async def test_the_command_measures_and_writes_what_it_measured(
    openai: tuple[OpenAi, str],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake, url = openai
    given = (
        "--arrival closed:2 poisson:200 --dataset turns:2:6:4 --requests 5 --slo ttft=900 --chat"
    )
    monkeypatch.setattr(sys, "argv", ["bench-serving", *given.split()])
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
    assert drawn(summary).count("<polyline") == 4


async def test_over_nats_times_and_text_are_seen(words: Vocabulary) -> None:
    broker = MemoryBroker()
    client = Client(MemoryTransport(broker), cluster=CLUSTER)
    scripts = RandomLengths(5, 3).scripts(words, 4, seed=3)
    async with (
        gateway(broker, script=("a", "b", "c")) as fake,
        NatsTarget(client, MODEL) as target,
    ):
        seen = await play(scripts, ClosedLoop(2), target)
    assert [(t.text, t.output_tokens, t.error) for t in seen] == [("abc", 3, None)] * 4
    assert all(request.request.ignore_eos for request in fake.requests)


async def test_over_nats_a_whole_answer_tells_what_the_server_counts(words: Vocabulary) -> None:
    broker = MemoryBroker()
    client = Client(MemoryTransport(broker), cluster=CLUSTER)
    async with (
        gateway(broker, script=("abc",)) as fake,
        WholeNatsTarget(client, MODEL) as target,
    ):
        (seen,) = await play(RandomLengths(5, 3).scripts(words, 1, 4), ClosedLoop(1), target)
        fake.refuses = Overloaded("full")
        (refused,) = await play(RandomLengths(5, 3).scripts(words, 1, 5), ClosedLoop(1), target)
    assert seen.prompt_tokens == USAGE.prompt_tokens
    assert (seen.output_tokens, seen.cached_tokens) == (USAGE.completion_tokens, 0)
    assert refused.error == "overloaded: full"
