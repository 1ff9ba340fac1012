"""A stack with little room: what does not fit is refused, and one trace crosses all services."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import aiohttp
import pytest
from tests.system.collector import Collector, collecting
from tests.system.pages import pages_in_use
from tests.system.stack import Stack, serving, stop, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]

BODY_BYTES_MAX = 4000
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
LONG = {"stream": True, "max_tokens": 1900, "ignore_eos": True, "prompt": "Count"}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


@pytest.fixture(scope="module")
def small(collector: Collector) -> Iterator[Stack]:
    flags = {
        "--telemetry-otlp-endpoint": collector.url,
        "--scheduler-queue-max": "2",
        "--scheduler-look-ahead": "1",
        "--batching-running-max": "1",
        "--gateway-body-bytes-max": str(BODY_BYTES_MAX),
    }
    words = (word for flag in flags.items() for word in flag)
    with serving("--enable-trace", *words) as running:
        yield running


async def post(
    session: aiohttp.ClientSession, stack: Stack, body: dict[str, object]
) -> tuple[int, str, str]:
    """Return status, Retry-After and body."""
    async with session.post(f"{stack.url}/v1/completions", json=body) as answer:
        return answer.status, answer.headers.get("Retry-After", ""), await answer.text()


async def test_what_the_queue_does_not_hold_is_told_when_to_come_back(small: Stack):
    async with aiohttp.ClientSession() as session:
        body = {**LONG, "stream": False, "max_tokens": 200, "model": small.model}
        answers = await asyncio.gather(*(post(session, small, body) for _ in range(12)))
    statuses = [status for status, _, _ in answers]
    assert set(statuses) == {200, 503}
    assert statuses.count(200) >= 2
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
