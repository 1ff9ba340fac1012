"""Responses that are made in the background, on a real nats-server: one gateway makes them, and
another one tells, follows, cancels and forgets them."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from tests.support.nats import NatsServer
from tests.support.services import running
from tests.support.wait import until
from tests.unit.gateway.calls import TEXT
from tests.unit.gateway.cluster import CONTEXT_TOKENS, House, house
from tests.unit.gateway.test_responses import RESPONSES, Body
from tests.unit.gateway.test_stored_responses import joining

from antiphon.gateway import peers
from antiphon.gateway.http.core.respond import ResponseHandler
from antiphon.gateway.http.openai.responses import endpoints
from antiphon.gateway.http.openai.responses import store as journal
from antiphon.gateway.http.openai.responses.store import ResponseEventLog
from antiphon.gateway.service import GatewayService
from antiphon.wire.errors import Unavailable, WorkerLost

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable


class Pair:
    """Two gateways of one cluster."""

    def __init__(self, first: House, other: GatewayService, session: aiohttp.ClientSession) -> None:
        self.first = first
        self.cluster = first.cluster
        self.session = session
        self.other_url = f"http://127.0.0.1:{other.port}{RESPONSES}"

    async def create(self, **said: object) -> Body:
        """At the first, in the background."""
        body = {"input": "hi", "background": True} | said
        async with self.session.post(self.first.url + RESPONSES, json=body) as reply:
            told = await reply.json()
            assert reply.status == 200, told
            return told

    async def ask(self, method: str, path: str) -> tuple[int, Body]:
        """Ask the other."""
        async with self.session.request(method, f"{self.other_url}/{path}") as reply:
            return reply.status, await reply.json()

    async def follow(self, response_id: str, query: str = "") -> list[str]:
        """The events that the other tells."""
        url = f"{self.other_url}/{response_id}?stream=true{query}"
        async with self.session.get(url) as reply:
            assert reply.status == 200, await reply.text()
            return blocks(await reply.text())

    async def state(self, response_id: str) -> object:
        return (await self.ask("GET", response_id))[1]["status"]


def blocks(text: str) -> list[str]:
    return [block for block in text.split("\n\n") if block]


def number_of(block: str) -> int:
    return json.loads(block.partition("data: ")[2])["sequence_number"]


async def becomes(look: Callable[[], Awaitable[object]], wanted: object) -> None:
    async with asyncio.timeout(10):
        while await look() != wanted:  # noqa: ASYNC110  # no event tells
            await asyncio.sleep(0.02)


@asynccontextmanager
async def pair(server: NatsServer, drain_timeout_s: float = 5.0) -> AsyncIterator[Pair]:
    join = joining(server)
    async with house(join, drain_timeout_s=drain_timeout_s) as first:
        settings = first.gateway.around.settings
        async with (
            running(GatewayService, join(), settings=settings, instance="gateway-1") as other,
            aiohttp.ClientSession() as session,
        ):
            await until(lambda: len(first.peers) == len(first.cluster.roles) + 1)
            yield Pair(first, other.service, session)


@pytest.fixture
async def server() -> AsyncIterator[NatsServer]:
    async with NatsServer(durable=True) as started:
        yield started


@pytest.fixture
async def two(server: NatsServer) -> AsyncIterator[Pair]:
    async with pair(server) as both:
        yield both


async def test_it_is_made_while_nobody_waits_and_told_by_another_gateway(two: Pair) -> None:
    two.cluster.hold_at = 2
    made = await two.create()
    assert (made["background"], made["output"]) == (True, [])
    response_id = made["id"]
    await becomes(lambda: two.state(response_id), "in_progress")
    two.cluster.go.set()
    await becomes(lambda: two.state(response_id), "completed")
    _, whole = await two.ask("GET", response_id)
    (item,) = whole["output"]
    assert item["content"][0]["text"] == TEXT
    status, reply = await two.ask("GET", f"{response_id}?stream=true")
    assert (status, reply["error"]["param"]) == (400, "stream")


async def test_another_gateway_cancels_it(two: Pair) -> None:
    two.cluster.hold_at = 2
    response_id = (await two.create())["id"]
    await becomes(lambda: two.state(response_id), "in_progress")
    status, cancelled = await two.ask("POST", f"{response_id}/cancel")
    assert (status, cancelled["status"]) == (200, "cancelled")
    assert (await two.ask("POST", f"{response_id}/cancel"))[1] == cancelled
    await until(lambda: two.cluster.open == set())
    two.cluster.go.set()


async def test_another_gateway_forgets_it_while_it_is_made(two: Pair) -> None:
    two.cluster.hold_at = 0
    response_id = (await two.create(stream=False))["id"]
    assert (await two.ask("DELETE", response_id))[0] == 200
    assert (await two.ask("GET", response_id))[0] == 404
    await until(lambda: two.cluster.open == set())
    two.cluster.go.set()
    assert (await two.ask("POST", f"{response_id}/cancel"))[0] == 404


async def test_its_events_are_told_by_any_gateway_from_any_event_on(two: Pair) -> None:
    two.cluster.hold_at = 2
    body = {"input": "hi", "background": True, "stream": True}
    async with two.session.post(two.first.url + RESPONSES, json=body) as reply:
        first = (await reply.content.readuntil(b"\n\n")).decode()
        assert first.startswith("event: response.created")
    # The client has left; what it asked for is made.
    response_id = json.loads(first.partition("data: ")[2])["response"]["id"]
    async with asyncio.TaskGroup() as group:
        following = group.create_task(two.follow(response_id))
        await becomes(lambda: two.state(response_id), "in_progress")
        two.cluster.go.set()
    told = following.result()
    assert [number_of(block) for block in told] == list(range(len(told)))
    names = [block.split("\n")[0].removeprefix("event: response.") for block in told]
    assert names[:3] == ["created", "queued", "in_progress"]
    assert names[-1] == "completed"
    for after in (0, 4, len(told) - 1, len(told) + 5):
        assert await two.follow(response_id, f"&starting_after={after}") == told[after + 1 :]
    status, reply_body = await two.ask("GET", f"{response_id}?stream=true&starting_after=x")
    assert (status, reply_body["error"]["param"]) == (400, "starting_after")
    await two.ask("DELETE", response_id)


async def test_a_stream_of_what_is_cancelled_ends_so(two: Pair) -> None:
    two.cluster.hold_at = 2
    body = {"input": "hi", "background": True, "stream": True}
    async with two.session.post(two.first.url + RESPONSES, json=body) as reply:
        first = (await reply.content.readuntil(b"\n\n")).decode()
        response_id = json.loads(first.partition("data: ")[2])["response"]["id"]
        await two.ask("POST", f"{response_id}/cancel")
        rest = blocks(await reply.text())
    assert rest[-1].startswith("event: response.incomplete")
    assert '"status":"cancelled"' in rest[-1]
    two.cluster.go.set()


async def test_first_reply_is_the_initial_state_though_the_response_has_ended(
    two: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    detach = ResponseHandler.detach

    async def slow(handler: ResponseHandler, *parts: Any) -> None:
        await detach(handler, *parts)
        await handler._detached.idle()  # pyright: ignore[reportPrivateUsage]

    monkeypatch.setattr(ResponseHandler, "detach", slow)
    made = await two.create()
    assert (made["status"], made["output"]) == ("queued", [])


async def test_a_bug_before_the_first_reply_is_an_error_of_the_request(
    two: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(endpoints, "draft", broken)
    body = {"input": "hi", "background": True}
    async with two.session.post(two.first.url + RESPONSES, json=body) as reply:
        assert reply.status == 500
    await until(lambda: two.first.service.submission.idle)


async def test_what_fails_in_the_background_is_told_as_failed(two: Pair) -> None:
    two.cluster.row_error = WorkerLost("the worker is gone")
    response_id = (await two.create())["id"]
    await becomes(lambda: two.state(response_id), "failed")
    _, failed = await two.ask("GET", response_id)
    assert failed["error"]["message"] == "the worker is gone"


async def test_what_cannot_begin_is_refused_at_once(two: Pair) -> None:
    for said, status in (
        ({"input": "x" * CONTEXT_TOKENS}, 400),
        ({"store": False}, 400),
        ({"model": "other"}, 404),
    ):
        body = {"input": "hi", "background": True} | said
        async with two.session.post(two.first.url + RESPONSES, json=body) as reply:
            assert reply.status == status
    assert two.cluster.open == set()


async def test_only_what_is_made_in_the_background_can_be_cancelled(two: Pair) -> None:
    made = await two.create(background=False)
    assert (await two.ask("POST", f"{made['id']}/cancel"))[0] == 400


async def test_a_gateway_that_drains_makes_what_it_has_begun(two: Pair) -> None:
    two.cluster.hold_at = 2
    response_id = (await two.create())["id"]
    two.first.gateway.stop.set()
    two.cluster.go.set()
    await two.first.gateway.ended()
    assert await two.state(response_id) == "completed"


async def test_what_a_dead_gateway_was_making_has_failed(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "SETTLE_S", 0.1)
    async with pair(server, drain_timeout_s=0.1) as two:
        two.cluster.hold_at = 2
        made = await two.create(stream=False)
        response_id = made["id"]
        await becomes(lambda: two.state(response_id), "in_progress")
        await two.first.gateway.ended()
        two.cluster.go.set()
        await becomes(lambda: two.state(response_id), "failed")
        status, reply = await two.ask("POST", f"{response_id}/cancel")
        assert (status, reply["status"]) == (200, "failed")


async def test_events_are_pinged_while_there_are_none(
    two: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "PING_S", 0.0)
    monkeypatch.setattr(journal, "HEADERS_S", 0.0)
    two.cluster.hold_at = 0
    body = {"input": "hi", "background": True, "stream": True}
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
    two.cluster.hold_at = 0
    body = {"input": "hi", "background": True, "stream": True}
    async with two.session.post(two.first.url + RESPONSES, json=body) as reply:
        await reply.content.readuntil(b"\n\n")

        async def lost(_: ResponseEventLog, __: int) -> None:
            raise Unavailable("the store is away")

        monkeypatch.setattr(ResponseEventLog, "_next", lost)
        rest = (await reply.read()).decode()
    assert "event: error\n" in rest
    assert json.loads(blocks(rest)[-1].partition("data: ")[2])["code"] == "unavailable"
    two.cluster.go.set()
