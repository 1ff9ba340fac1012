"""Streams send their headers at once, and pings while the model has written nothing new."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import aiohttp
import anthropic
import pytest
from tests.support.clock import ManualClock
from tests.support.wait import until
from tests.unit.gateway.calls import CHAT, COMPLETE, HI, Body, openai_client, post
from tests.unit.gateway.cluster import MODEL, SCRIPT, House, house

from antiphon.gateway.http import families as doors
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
BODIES: dict[str, Body] = {
    CHAT: {"messages": HI},
    COMPLETE: {"prompt": "hi"},
    "/v1/responses": {"input": "hi", "store": False},
    "/v1/messages": {"messages": HI, "max_tokens": 8},
    "/generate": {"text": "hi"},
    "/api/chat": {"messages": HI},
    "/api/generate": {"prompt": "hi"},
}
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


class Hands:
    """A house, and the clock by which its streams are silent."""

    def __init__(self, at: House, clock: ManualClock) -> None:
        self.at = at
        self.clock = clock

    async def headers_due(self) -> None:
        """Let so much time pass, once the leader has the request, that headers go out."""
        await until(lambda: len(self.at.cluster.submits) == 1)
        self.clock.advance(60.0)

    @asynccontextmanager
    async def opened(self, path: str) -> AsyncIterator[aiohttp.ClientResponse]:
        """The reply to a stream that has no text yet, once its headers are there."""
        async with (
            aiohttp.ClientSession() as session,
            asyncio.TaskGroup() as group,
        ):
            group.create_task(self.headers_due())
            body = BODIES[path] | {"stream": True}
            async with session.post(self.at.url + path, json=body) as reply:
                yield reply


@pytest.fixture
async def hands(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Hands]:
    clock = ManualClock(now=SystemClock().now())
    monkeypatch.setattr(doors, "Keepalive", lambda _: Keepalive(clock))
    async with house() as at:
        at.cluster.hold_at = 0
        yield Hands(at, clock)


async def up_to(mark: bytes, reply: aiohttp.ClientResponse) -> bytes:
    """What comes until there is this."""
    text = b""
    while mark not in text:
        piece = await reply.content.readany()
        assert piece, text
        text += piece
    return text


@pytest.mark.parametrize("path", BODIES)
async def test_headers_come_before_the_first_token_and_pings_while_there_is_none(
    hands: Hands, path: str
) -> None:
    ping = PINGS.get(path, COMMENT)
    async with hands.opened(path) as reply:
        assert reply.status == 200
        first = await up_to(ping, reply)
        assert SCRIPT[0].encode() not in first
        if path == "/v1/messages":
            assert first.startswith(b"event: message_start")
        hands.clock.advance(PING_S)
        await up_to(ping, reply)
        hands.at.cluster.go.set()
        assert SCRIPT[0].encode() in await reply.read()


@pytest.mark.parametrize("path", BODIES)
async def test_error_after_the_headers_is_in_the_stream_in_the_form_of_its_family(
    hands: Hands, path: str
) -> None:
    hands.at.cluster.script = ("",)
    hands.at.cluster.row_error = WorkerLost("the worker of this request died")
    async with hands.opened(path) as reply:
        assert reply.status == 200
        hands.at.cluster.go.set()
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
    overloaded = path == "/v1/messages" and status == 503
    assert found == (529 if overloaded else status), reply
    assert "text/event-stream" not in cast("dict[str, str]", headers)["Content-Type"]


async def test_sdks_read_a_stream_that_begins_with_pings(
    hands: Hands, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def later() -> None:
        await hands.headers_due()
        await until(lambda: bool(sent))
        hands.at.cluster.go.set()

    sent = pings_sent(monkeypatch, MessagesResponseWriter)
    async with (
        asyncio.TaskGroup() as group,
        anthropic.AsyncAnthropic(base_url=hands.at.url, api_key="none", max_retries=0) as one,
    ):
        group.create_task(later())
        messages: list[anthropic.types.MessageParam] = [{"role": "user", "content": "hi"}]
        async with one.messages.stream(model=MODEL, max_tokens=8, messages=messages) as stream:
            message = await stream.get_final_message()
    assert message.content[0].type == "text"
    assert message.content[0].text == "".join(SCRIPT)
    # What was found in the cache is told at the end, where the beginning could not know it.
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (1, 1)


async def test_openai_sdk_reads_a_stream_that_begins_with_pings(
    hands: Hands, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def later() -> None:
        await hands.headers_due()
        await until(lambda: bool(sent))
        hands.at.cluster.go.set()

    sent = pings_sent(monkeypatch, ChatResponseWriter)
    async with asyncio.TaskGroup() as group, openai_client(hands.at) as opened:
        group.create_task(later())
        chunks = await opened.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True
        )
        text = "".join([each.choices[0].delta.content or "" async for each in chunks])
    assert text == "".join(SCRIPT)


def pings_sent(monkeypatch: pytest.MonkeyPatch, kind: type[ResponseWriter]) -> list[bytes]:
    """What is sent as pings from here on."""
    sent: list[bytes] = []
    ping = kind.ping

    def noted(voice: ResponseWriter) -> bytes:
        sent.append(ping(voice))
        return sent[-1]

    monkeypatch.setattr(kind, "ping", noted)
    return sent


class Played:
    """A chorus of streams of which only the acceptance counts."""

    def __init__(self, *accepted_at: float | None) -> None:
        self.streams = [SimpleNamespace(received_at=0.0, accepted_at=at) for at in accepted_at]
        self.nudges = 0

    def wake(self) -> None:
        self.nudges += 1


def test_headers_are_due_half_a_second_after_a_request_came() -> None:
    clock = ManualClock()
    with Keepalive(clock).watch(cast("StreamGroup", Played(0.1))) as silence:
        clock.advance(HEADERS_S - 0.05)
        assert not silence.is_due
        clock.advance(0.06)
        assert silence.is_due


def test_silence_is_counted_from_acceptance_then_from_what_was_sent() -> None:
    clock = ManualClock()
    keepalive = Keepalive(clock)
    chorus = Played(0.0, None)
    with keepalive.watch(cast("StreamGroup", chorus)) as silence:
        clock.advance(3.0)
        assert not silence.is_due
        chorus.streams[1].accepted_at = clock.now()
        clock.advance(REFUSAL_S - 0.05)
        assert not silence.is_due
        clock.advance(0.06)
        assert silence.is_due
        silence.reset()
        clock.advance(PING_S - 0.1)
        keepalive.check()
        assert chorus.nudges == 0
        clock.advance(0.1)
        keepalive.check()
        assert chorus.nudges == 1
    keepalive.check()
    assert chorus.nudges == 1


def test_headers_do_not_wait_for_a_leader_for_ever() -> None:
    clock = ManualClock()
    with Keepalive(clock).watch(cast("StreamGroup", Played(None))) as silence:
        clock.advance(ACCEPT_S - 0.1)
        assert not silence.is_due
        clock.advance(0.1)
        assert silence.is_due
