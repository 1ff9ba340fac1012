"""Background responses on a real nats-server: one gateway generates them, and another reads,
cancels and deletes them."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from tests.support.wait import until
from tests.unit.gateway.calls import RESPONSES, TEXT, Body, call, ok, post
from tests.unit.gateway.cluster import (
    CONTEXT_TOKENS,
    Address,
    House,
    house,
    joining,
    second_gateway,
)

from antiphon.gateway import peers
from antiphon.gateway.http.core.respond import ResponseHandler
from antiphon.gateway.http.openai.responses import endpoints
from antiphon.gateway.http.openai.responses import store as journal
from antiphon.gateway.http.openai.responses.store import ResponseEventLog
from antiphon.wire.errors import Unavailable, WorkerLost

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.nats import NatsServer
    from tests.unit.gateway.cluster import Cluster


BACKGROUND = {"input": "hi", "background": True}


@dataclass
class Pair:
    """Two gateways of one cluster: responses are created at the first, and read at the other."""

    first: House
    other: Address
    session: aiohttp.ClientSession

    @property
    def cluster(self) -> Cluster:
        return self.first.cluster

    async def create(self, **fields: object) -> Body:
        return await ok(self.first, RESPONSES, BACKGROUND | fields)

    @asynccontextmanager
    async def streaming(self) -> AsyncIterator[tuple[aiohttp.ClientResponse, Body]]:
        """The stream of a new response, and its first event."""
        body = BACKGROUND | {"stream": True}
        async with self.session.post(self.first.url + RESPONSES, json=body) as reply:
            assert reply.status == 200, await reply.text()
            first = (await reply.content.readuntil(b"\n\n")).decode()
            assert first.startswith("event: response.created")
            yield reply, data_of(first)

    async def read(self, method: str, path: str) -> tuple[int, Any]:
        status, reply, _ = await call(self.other, method, f"{RESPONSES}/{path}")
        return status, reply

    async def follow(self, response_id: str, query: str = "") -> list[str]:
        """The events from the other gateway."""
        status, text = await self.read("GET", f"{response_id}?stream=true{query}")
        assert status == 200, text
        return blocks(text)

    async def becomes(self, response_id: str, state: str) -> None:
        async with asyncio.timeout(10):
            while await self.state(response_id) != state:  # noqa: ASYNC110  # there is no event
                await asyncio.sleep(0.02)

    async def state(self, response_id: str) -> str:
        return (await self.read("GET", response_id))[1]["status"]


def blocks(text: str) -> list[str]:
    return [block for block in text.split("\n\n") if block]


def data_of(block: str) -> Body:
    return json.loads(block.partition("data: ")[2])


@asynccontextmanager
async def pair(server: NatsServer, drain_timeout_s: float = 5.0) -> AsyncIterator[Pair]:
    async with (
        house(joining(server), drain_timeout_s=drain_timeout_s) as first,
        second_gateway(first) as other,
        aiohttp.ClientSession() as session,
    ):
        yield Pair(first, other, session)


@pytest.fixture
async def two(server: NatsServer) -> AsyncIterator[Pair]:
    async with pair(server) as both:
        yield both


async def test_background_response_is_read_from_another_gateway(two: Pair) -> None:
    two.cluster.hold_at = 2
    created = await two.create()
    assert (created["background"], created["output"]) == (True, [])
    response_id = created["id"]
    await two.becomes(response_id, "in_progress")
    two.cluster.go.set()
    await two.becomes(response_id, "completed")
    _, whole = await two.read("GET", response_id)
    (item,) = whole["output"]
    assert item["content"][0]["text"] == TEXT
    status, reply = await two.read("GET", f"{response_id}?stream=true")
    assert (status, reply["error"]["param"]) == (400, "stream")


async def test_another_gateway_cancels_a_background_response(two: Pair) -> None:
    two.cluster.hold_at = 2
    response_id = (await two.create())["id"]
    await two.becomes(response_id, "in_progress")
    status, cancelled = await two.read("POST", f"{response_id}/cancel")
    assert (status, cancelled["status"]) == (200, "cancelled")
    assert (await two.read("POST", f"{response_id}/cancel"))[1] == cancelled
    await until(lambda: two.cluster.open == set())
    two.cluster.go.set()


async def test_another_gateway_deletes_a_running_background_response(two: Pair) -> None:
    two.cluster.hold_at = 0
    response_id = (await two.create(stream=False))["id"]
    assert (await two.read("DELETE", response_id))[0] == 200
    assert (await two.read("GET", response_id))[0] == 404
    await until(lambda: two.cluster.open == set())
    two.cluster.go.set()
    assert (await two.read("POST", f"{response_id}/cancel"))[0] == 404


async def test_events_are_streamed_by_any_gateway_from_any_event_on(two: Pair) -> None:
    two.cluster.hold_at = 2
    async with two.streaming() as (_, first):
        response_id = first["response"]["id"]
    # The client has left; its response is generated nevertheless.
    async with asyncio.TaskGroup() as group:
        following = group.create_task(two.follow(response_id))
        await two.becomes(response_id, "in_progress")
        two.cluster.go.set()
    events = following.result()
    assert [data_of(event)["sequence_number"] for event in events] == list(range(len(events)))
    names = [event.split("\n")[0].removeprefix("event: response.") for event in events]
    assert names[:3] == ["created", "queued", "in_progress"]
    assert names[-1] == "completed"
    for after in (0, 4, len(events) - 1, len(events) + 5):
        assert await two.follow(response_id, f"&starting_after={after}") == events[after + 1 :]
    status, reply = await two.read("GET", f"{response_id}?stream=true&starting_after=x")
    assert (status, reply["error"]["param"]) == (400, "starting_after")
    await two.read("DELETE", response_id)


async def test_stream_of_a_cancelled_response_ends_as_incomplete(two: Pair) -> None:
    two.cluster.hold_at = 2
    async with two.streaming() as (reply, first):
        await two.read("POST", f"{first['response']['id']}/cancel")
        last = blocks(await reply.text())[-1]
    assert last.startswith("event: response.incomplete")
    assert '"status":"cancelled"' in last
    two.cluster.go.set()


async def test_first_reply_is_the_initial_state_though_the_response_has_ended(
    two: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    detach = ResponseHandler.detach

    async def slow(handler: ResponseHandler, *parts: Any) -> None:
        await detach(handler, *parts)
        await handler._detached.idle()

    monkeypatch.setattr(ResponseHandler, "detach", slow)
    created = await two.create()
    assert (created["status"], created["output"]) == ("queued", [])


async def test_bug_before_the_first_reply_is_an_error_of_the_request(
    two: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(endpoints, "draft", broken)
    assert (await post(two.first, RESPONSES, BACKGROUND)).status == 500
    await until(lambda: two.first.service.submission.idle)


async def test_background_response_that_fails_has_its_error(two: Pair) -> None:
    two.cluster.row_error = WorkerLost("the worker is gone")
    response_id = (await two.create())["id"]
    await two.becomes(response_id, "failed")
    _, failed = await two.read("GET", response_id)
    assert failed["error"]["message"] == "the worker is gone"


async def test_background_response_that_cannot_start_is_refused_at_once(two: Pair) -> None:
    for fields, status in (
        ({"input": "x" * CONTEXT_TOKENS}, 400),
        ({"store": False}, 400),
        ({"model": "other"}, 404),
    ):
        assert (await post(two.first, RESPONSES, BACKGROUND | fields)).status == status
    assert two.cluster.open == set()


async def test_only_background_responses_can_be_cancelled(two: Pair) -> None:
    created = await two.create(background=False)
    assert (await two.read("POST", f"{created['id']}/cancel"))[0] == 400


async def test_draining_gateway_completes_its_background_responses(two: Pair) -> None:
    two.cluster.hold_at = 2
    response_id = (await two.create())["id"]
    two.first.gateway.stop.set()
    two.cluster.go.set()
    await two.first.gateway.ended()
    assert await two.state(response_id) == "completed"


async def test_background_response_of_a_dead_gateway_has_failed(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "SETTLE_S", 0.1)
    async with pair(server, drain_timeout_s=0.1) as two:
        two.cluster.hold_at = 2
        response_id = (await two.create(stream=False))["id"]
        await two.becomes(response_id, "in_progress")
        await two.first.gateway.ended()
        two.cluster.go.set()
        await two.becomes(response_id, "failed")
        status, reply = await two.read("POST", f"{response_id}/cancel")
        assert (status, reply["status"]) == (200, "failed")


async def test_stream_without_events_has_pings(two: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "PING_S", 0.0)
    monkeypatch.setattr(journal, "HEADERS_S", 0.0)
    two.cluster.hold_at = 0
    body = BACKGROUND | {"stream": True}
    async with two.session.post(two.first.url + RESPONSES, json=body) as reply:
        assert reply.status == 200, await reply.text()
        text = b""
        while b"response.queued" not in text or b": ping" not in text:
            text += await reply.content.readuntil(b"\n\n")
        two.cluster.go.set()
        assert b"event: response.completed" in await reply.read()


async def test_stream_that_cannot_be_followed_further_ends_with_an_error_event(
    two: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(_: ResponseEventLog, __: int) -> None:
        raise Unavailable("the store is away")

    two.cluster.hold_at = 0
    async with two.streaming() as (reply, _):
        monkeypatch.setattr(ResponseEventLog, "_next", lost)
        rest = (await reply.read()).decode()
    assert "event: error\n" in rest
    assert data_of(blocks(rest)[-1])["code"] == "unavailable"
    two.cluster.go.set()
