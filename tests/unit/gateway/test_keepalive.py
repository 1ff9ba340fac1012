"""Streams send their headers at once, and pings while the model has written nothing new."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import aiohttp
import anthropic
import pytest
from tests.support.clock import ManualClock
from tests.support.wait import until
from tests.unit.gateway.calls import (
    BODIES,
    CHAT,
    COMPLETE,
    HI,
    MESSAGES,
    TEXT,
    openai_client,
    post,
)
from tests.unit.gateway.cluster import MODEL, SCRIPT, House, house

from antiphon.gateway.http import families
from antiphon.gateway.http.anthropic.write import MessagesResponseWriter
from antiphon.gateway.http.core.keepalive import ACCEPT_S, HEADERS_S, PING_S, REFUSAL_S, Keepalive
from antiphon.gateway.http.openai.write import ChatResponseWriter
from antiphon.service.clock import SystemClock
from antiphon.wire.errors import EngineError, InvalidRequest, Overloaded, WorkerLost

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from antiphon.gateway.http.core.writer import ResponseWriter
    from antiphon.gateway.stream.stream import StreamGroup

COMMENT = b": ping"
PINGS = {
    "/v1/messages": b'data: {"type":"ping"}',
    "/api/chat": b'"content":""',
    "/api/generate": b'"response":""',
}
FAILED = {
    CHAT: b'data: {"error":',
    COMPLETE: b'data: {"error":',
    "/v1/responses": b"event: response.failed",
    "/v1/messages": b"event: error",
    "/generate": b'data: {"error":',
    "/api/chat": b'{"error":',
    "/api/generate": b'{"error":',
}


@dataclass
class SilentStreams:
    """A gateway whose streams write nothing, and the clock that measures their silence."""

    at: House
    clock: ManualClock

    async def headers_due(self) -> None:
        """Let enough time pass for headers, once the leader has the request."""
        await until(lambda: len(self.at.cluster.submits) == 1)
        self.clock.advance(60.0)

    async def go_after(self, pings: list[bytes]) -> None:
        """Let the model write once a ping was sent."""
        await self.headers_due()
        await until(lambda: bool(pings))
        self.at.cluster.go.set()

    @asynccontextmanager
    async def opened(self, path: str) -> AsyncIterator[aiohttp.ClientResponse]:
        """The reply to a stream that has no text yet, once its headers are there."""
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
            group.create_task(self.headers_due())
            body = BODIES[path] | {"stream": True}
            async with session.post(self.at.url + path, json=body) as reply:
                yield reply


@pytest.fixture
async def silent(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SilentStreams]:
    clock = ManualClock(now=SystemClock().now())
    monkeypatch.setattr(families, "Keepalive", lambda _: Keepalive(clock))
    async with house() as at:
        at.cluster.hold_at = 0
        yield SilentStreams(at, clock)


async def up_to(mark: bytes, reply: aiohttp.ClientResponse) -> bytes:
    """Read until a mark."""
    text = b""
    while mark not in text:
        piece = await reply.content.readany()
        assert piece, text
        text += piece
    return text


@pytest.mark.parametrize("path", BODIES)
async def test_headers_come_before_the_first_token_and_pings_while_there_is_none(
    silent: SilentStreams, path: str
) -> None:
    ping = PINGS.get(path, COMMENT)
    async with silent.opened(path) as reply:
        assert reply.status == 200
        first = await up_to(ping, reply)
        assert SCRIPT[0].encode() not in first
        if path == MESSAGES:
            assert first.startswith(b"event: message_start")
        silent.clock.advance(PING_S)
        await up_to(ping, reply)
        silent.at.cluster.go.set()
        assert SCRIPT[0].encode() in await reply.read()


@pytest.mark.parametrize("path", BODIES)
async def test_error_after_the_headers_is_in_the_stream_in_the_form_of_its_family(
    silent: SilentStreams, path: str
) -> None:
    silent.at.cluster.script = ("",)
    silent.at.cluster.row_error = WorkerLost("the worker of this request died")
    async with silent.opened(path) as reply:
        assert reply.status == 200
        silent.at.cluster.go.set()
        rest = await reply.read()
    assert FAILED[path] in rest
    assert b"the worker of this request died" in rest


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Overloaded("The request queue is full.", retry_after_s=1.0), 503),
        (InvalidRequest("grammar: it does not compile", param="grammar"), 400),
    ],
)
async def test_refusal_of_the_leader_or_at_once_of_the_worker_has_its_status(
    at: House, path: str, error: EngineError, status: int
) -> None:
    if status == 400:
        at.cluster.script, at.cluster.row_error = ("",), error
    else:
        at.cluster.submit_error = error
    found, reply, headers = await post(at, path, BODIES[path] | {"stream": True})
    overloaded = path == MESSAGES and status == 503
    assert found == (529 if overloaded else status), reply
    assert "text/event-stream" not in headers["Content-Type"]


async def test_anthropic_client_reads_a_stream_that_begins_with_pings(
    silent: SilentStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    pings = pings_sent(monkeypatch, MessagesResponseWriter)
    async with (
        asyncio.TaskGroup() as group,
        anthropic.AsyncAnthropic(base_url=silent.at.url, api_key="none", max_retries=0) as client,
    ):
        group.create_task(silent.go_after(pings))
        async with client.messages.stream(model=MODEL, max_tokens=8, messages=HI) as stream:
            message = await stream.get_final_message()
    assert message.content[0].type == "text"
    assert message.content[0].text == TEXT
    # Cached tokens are counted at the end, since they are unknown at the beginning.
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (1, 1)


async def test_openai_client_reads_a_stream_that_begins_with_pings(
    silent: SilentStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    pings = pings_sent(monkeypatch, ChatResponseWriter)
    async with asyncio.TaskGroup() as group, openai_client(silent.at) as client:
        group.create_task(silent.go_after(pings))
        stream = await client.chat.completions.create(model=MODEL, messages=HI, stream=True)
        text = "".join([each.choices[0].delta.content or "" async for each in stream])
    assert text == TEXT


def pings_sent(monkeypatch: pytest.MonkeyPatch, kind: type[ResponseWriter]) -> list[bytes]:
    """What is sent as pings from here on."""
    sent: list[bytes] = []
    ping = kind.ping

    def noted(writer: ResponseWriter) -> bytes:
        sent.append(ping(writer))
        return sent[-1]

    monkeypatch.setattr(kind, "ping", noted)
    return sent


class Played:
    """A group of streams of which only the acceptance counts."""

    def __init__(self, *accepted_at: float | None) -> None:
        self.streams = [SimpleNamespace(received_at=0.0, accepted_at=at) for at in accepted_at]
        self.wakeups = 0

    def wake(self) -> None:
        self.wakeups += 1


def test_headers_are_due_half_a_second_after_a_request_came() -> None:
    clock = ManualClock()
    with Keepalive(clock).watch(cast("StreamGroup", Played(0.1))) as silence:
        clock.advance(HEADERS_S - 0.05)
        assert not silence.is_due
        clock.advance(0.06)
        assert silence.is_due


def test_silence_is_counted_from_acceptance_then_from_the_last_write() -> None:
    clock = ManualClock()
    keepalive = Keepalive(clock)
    group = Played(0.0, None)
    with keepalive.watch(cast("StreamGroup", group)) as silence:
        clock.advance(3.0)
        assert not silence.is_due
        group.streams[1].accepted_at = clock.now()
        clock.advance(REFUSAL_S - 0.05)
        assert not silence.is_due
        clock.advance(0.06)
        assert silence.is_due
        silence.reset()
        for seconds, wakeups in ((PING_S - 0.1, 0), (0.1, 1)):
            clock.advance(seconds)
            keepalive.check()
            assert group.wakeups == wakeups
    keepalive.check()
    assert group.wakeups == 1


def test_headers_wait_for_a_leader_only_so_long() -> None:
    clock = ManualClock()
    with Keepalive(clock).watch(cast("StreamGroup", Played(None))) as silence:
        clock.advance(ACCEPT_S - 0.1)
        assert not silence.is_due
        clock.advance(0.1)
        assert silence.is_due
