"""Stacks with little room: what does not fit is refused or cut. And a trace of all services."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import aiohttp
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from tests.system.stack import Stack, module_stack, pages_in_use, serving, stop, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

BODY_BYTES_MAX = 4000
MAX_QUEUED = 1
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
LONG = {"stream": True, "max_tokens": 1900, "ignore_eos": True, "prompt": "Count"}


@dataclass(frozen=True)
class Seen:
    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str


class Collector(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Seen] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def take(self, request: ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            attributes = {a.key: a.value.string_value for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    seen = Seen(
                        attributes["service.name"],
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                    )
                    self.spans.append(seen)


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        assert isinstance(self.server, Collector)
        self.server.take(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.end_headers()
        self.wfile.write(ExportTraceServiceResponse().SerializeToString())

    def log_request(self, code: object = "-", size: object = "-") -> None:
        """Keep the test's output to itself."""


@contextmanager
def collecting() -> Iterator[Collector]:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        try:
            yield collector
        finally:
            collector.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


@pytest.fixture(scope="module")
def small(collector: Collector) -> Iterator[Stack]:
    with serving(
        *("--enable-trace", "--telemetry-otlp-endpoint", collector.url),
        *("--max-running-requests", "1", "--max-queued-requests", str(MAX_QUEUED)),
        *("--gateway-body-bytes-max", str(BODY_BYTES_MAX), "--random-seed", "7"),
    ) as running:
        yield running


async def post(
    session: aiohttp.ClientSession, stack: Stack, body: dict[str, object]
) -> tuple[int, str, str]:
    async with session.post(f"{stack.url}/v1/completions", json=body) as answer:
        return answer.status, answer.headers.get("Retry-After", ""), await answer.text()


async def test_random_seed_gives_each_request_its_own(small: Stack) -> None:
    drawn: dict[str, object] = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 1.5}
    async with aiohttp.ClientSession() as session:
        answers = [await post(session, small, drawn | {"model": small.model}) for _ in range(4)]
    assert [status for status, _, _ in answers] == [200] * 4
    assert len({json.loads(text)["choices"][0]["text"] for _, _, text in answers}) == 4


async def test_max_queued_requests_counts_exactly_and_the_others_are_asked_to_come_back(
    small: Stack,
) -> None:
    async with aiohttp.ClientSession() as session:
        body = {**LONG, "stream": False, "max_tokens": 300, "model": small.model}
        answers = await asyncio.gather(*(post(session, small, body) for _ in range(10)))
    statuses = sorted(status for status, _, _ in answers)
    assert statuses == [200] * (1 + MAX_QUEUED) + [503] * (9 - MAX_QUEUED)
    for status, retry_after, text in answers:
        assert (status == 503) == bool(retry_after)
        assert status == 200 or '"code":"overloaded"' in text.replace(" ", "")


async def test_a_large_body_says_both_numbers(small: Stack):
    async with aiohttp.ClientSession() as session:
        status, _, text = await post(session, small, {"prompt": "x" * 5000})
    assert status == 413
    assert str(BODY_BYTES_MAX) in text
    assert "5" in text


async def test_a_client_that_leaves_stops_its_request_down_to_the_worker(small: Stack):
    async with aiohttp.ClientSession() as session:
        body = {**LONG, "model": small.model}
        answer = await session.post(f"{small.url}/v1/completions", json=body)
        await answer.content.readany()
        await asyncio.to_thread(wait_until, lambda: pages_in_use(small) > 0, 5, "pages are used")
        answer.close()
    left_at = time.monotonic()
    await asyncio.to_thread(wait_until, lambda: pages_in_use(small) == 0, 10, "pages are free")
    assert "outcome=cancelled" in small.log("gateway-0")
    # 1,900 tokens take longer than this: the worker did not just finish.
    assert time.monotonic() - left_at < 10


async def test_one_trace_crosses_all_services(small: Stack, collector: Collector):
    headers = {"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"}
    async with aiohttp.ClientSession(headers=headers) as session:
        status, _, _ = await post(session, small, {"prompt": "Hello", "model": small.model})
    assert status == 200
    await asyncio.to_thread(stop, small.process)  # what is not exported yet is, at the end
    spans = [span for span in collector.spans if span.trace_id == TRACE_ID]
    services = {span.service for span in spans}
    assert services == {"gateway", "tokenizer", "scheduler", "worker", "detokenizer"}
    known = {span.span_id for span in spans} | {"b7ad6b7169203331"}
    assert {span.parent_id for span in spans} <= known


CONTEXT_TOKENS = 128
KEPT = 122
WORDS = [f"word{number}" for number in range(5000)]


cutting = module_stack("--allow-auto-truncate", "--context-length", str(CONTEXT_TOKENS))


@pytest.mark.parametrize("words", [200, 5000], ids=("light", "heavy"))
def test_long_prompt_is_answered_from_its_beginning(cutting: Stack, words: int) -> None:
    text = " ".join(WORDS[:words])
    few = " ".join(WORDS[:30])
    tokens = cutting.post("/v1/tokenize", {"prompt": few})["tokens"]
    sampling = {"temperature": 0, "max_new_tokens": 50, "ignore_eos": True}
    body = {"sampling_params": sampling, "return_prompt_token_ids": True}
    reply = cutting.post("/generate", body | {"text": text})
    ids, meta = reply["prompt_token_ids"], reply["meta_info"]
    assert len(ids) == meta["prompt_tokens"] == KEPT
    assert ids[: len(tokens) - 1] == tokens[:-1]
    assert meta["completion_tokens"] == CONTEXT_TOKENS - KEPT
    same = cutting.post("/generate", body | {"input_ids": ids})
    assert same["text"] == reply["text"]


def test_truncation_is_logged_by_the_gateway(cutting: Stack) -> None:
    cutting.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi " * 999}]})
    lines = [line for line in cutting.log("gateway-0").splitlines() if "prompt truncated" in line]
    assert lines
    assert str(KEPT) in lines[-1]
