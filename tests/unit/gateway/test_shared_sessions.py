"""Sessions behind two gateways, on a real nats-server: any of them goes on, and either may die."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, cast

import aiohttp
import pytest
from tests.support.nats import NatsServer
from tests.support.services import client_bus, running
from tests.support.wait import until
from tests.unit.gateway.calls import Body
from tests.unit.gateway.cluster import House, house
from tests.unit.gateway.test_stored_responses import joining

from antiphon.config.gateway import SessionsConfig
from antiphon.gateway import peers
from antiphon.gateway.service import GatewayService
from antiphon.gateway.sessions import SessionParams, Sessions, session_store
from antiphon.service.clock import SystemClock
from antiphon.wire.base import Role
from antiphon.wire.codec import unpack_ids
from antiphon.wire.ids import DEFAULT_TENANT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SAID = [10, 11, 12, 13]


class Pair:
    """Two gateways of one cluster, behind nobody."""

    def __init__(self, first: House, urls: tuple[str, str], http: aiohttp.ClientSession) -> None:
        self.first = first
        self.cluster = first.cluster
        self.urls = urls
        self.http = http

    async def post(self, gateway: int, path: str, **body: object) -> tuple[int, object]:
        async with self.http.post(self.urls[gateway] + path, json=body) as reply:
            if reply.content_type == "text/event-stream":
                return reply.status, await reply.text()
            return reply.status, await reply.json(content_type=None)

    async def say(self, gateway: int, text: str, session: str, **said: object) -> int:
        """Ask in a session; return the status."""
        rid = said.pop("name", None)
        streams = said.pop("stream", False)
        params = {"id": session} | said
        body = {"text": text, "session_params": params, "rid": rid, "stream": streams}
        return (await self.post(gateway, "/generate", **body))[0]

    @property
    def prompt(self) -> list[int]:
        """What was asked last."""
        return list(unpack_ids(self.cluster.submits[-1].prompt_ids))


@asynccontextmanager
async def pair(server: NatsServer, config: SessionsConfig) -> AsyncIterator[Pair]:
    join = joining(server)
    async with house(join, sessions=config) as first:
        settings = first.gateway.around.settings
        async with (
            running(GatewayService, join(), settings=settings, instance="gateway-1") as other,
            aiohttp.ClientSession() as http,
        ):
            await until(lambda: len(first.peers) == len(first.cluster.roles) + 1)
            yield Pair(first, (first.url, f"http://127.0.0.1:{other.service.port}"), http)


@pytest.fixture
async def server() -> AsyncIterator[NatsServer]:
    async with NatsServer(durable=True) as started:
        yield started


@pytest.fixture
async def two(server: NatsServer) -> AsyncIterator[Pair]:
    async with pair(server, SessionsConfig()) as both:
        yield both


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_session_goes_on_at_the_other_gateway(two: Pair, streamed: bool) -> None:
    assert await two.post(0, "/open_session", session_id="s") == (200, "s")
    assert (await two.post(1, "/open_session", session_id="s"))[0] == 400
    assert await two.say(1, "ab", "s", name="1", stream=streamed) == 200
    assert await two.say(0, "c", "s", name="2", rid="1", stream=streamed) == 200
    assert two.prompt == [97, 98, *SAID, 99]
    assert await two.say(1, "d", "s", name="3", rid="2", stream=streamed) == 200
    assert two.prompt == [97, 98, *SAID, 99, *SAID, 100]
    assert (await two.post(1, "/close_session", session_id="s"))[0] == 200
    assert await two.say(0, "e", "s", rid="1") == 400


async def test_what_the_other_runs_is_aborted_where_it_is_replaced_or_closed(two: Pair) -> None:
    await two.post(0, "/open_session", session_id="s")
    two.cluster.hold_at = 1
    async with asyncio.TaskGroup() as group:
        told = group.create_task(
            two.post(1, "/generate", text="a", rid="x", session_params={"id": "s"})
        )
        await until(lambda: len(two.cluster.submits) == 1)
        assert (await two.post(0, "/close_session", session_id="s"))[0] == 200
    status, reply = told.result()
    meta = cast("dict[str, Body]", reply)["meta_info"]
    assert (status, cast("Body", meta["finish_reason"])["type"]) == (200, "abort")


async def test_what_a_dead_gateway_ran_is_forgotten(
    two: Pair, server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await two.post(0, "/open_session", session_id="s", capacity_of_str_len=40)
    assert await two.say(0, "a", "s", name="1") == 200
    async with client_bus(joining(server)(), "gateway-9", party=Role.GATEWAY) as bus:
        dying = Sessions(
            session_store(SessionsConfig(), bus),
            bus.process,
            SystemClock().unix_ms,
            lambda *_: False,
            never,
            keep_s=60.0,
            timeout_s=60.0,
        )
        await dying.begin(DEFAULT_TENANT, SessionParams("s", "1"), "2", 20)
        await dying.accept(DEFAULT_TENANT, SessionParams("s", "1"), "2")
    assert await two.say(1, "c" * 20, "s", name="3", rid="1") == 400, "there is no room"
    assert await two.say(1, "c", "s", name="3", rid="2") == 400, "it has not ended"
    monkeypatch.setattr(peers, "SETTLE_S", 0.0)
    assert await two.say(0, "c" * 20, "s", name="2", rid="1") == 200
    assert two.prompt == [97, *SAID, *b"c" * 20]


async def never(*_: object) -> None:
    raise AssertionError("nothing is aborted")


async def test_a_session_outlives_the_gateway_that_opened_it(server: NatsServer) -> None:
    async with pair(server, SessionsConfig()) as two:
        await two.post(0, "/open_session", session_id="s")
        assert await two.say(0, "a", "s", name="1") == 200
    async with pair(server, SessionsConfig()) as two:
        assert await two.say(1, "b", "s", rid="1") == 200
        assert two.prompt == [97, *SAID, 98]


async def test_without_a_broker_that_keeps_a_session_is_refused_for_now() -> None:
    async with NatsServer() as plain, pair(plain, SessionsConfig()) as two:
        status, _ = await two.post(0, "/open_session", session_id="s")
        assert status == 503


async def test_in_memory_a_session_is_known_where_it_was_opened(server: NatsServer) -> None:
    async with pair(server, SessionsConfig(store=False)) as two:
        await two.post(0, "/open_session", session_id="s")
        assert await two.say(0, "a", "s", name="1") == 200
        assert await two.say(1, "b", "s", rid="1") == 400
