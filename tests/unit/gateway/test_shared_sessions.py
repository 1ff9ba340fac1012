"""Sessions behind two gateways on a real nats-server: either continues them, and either may die."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from tests.support.nats import NatsServer
from tests.support.services import client_bus
from tests.support.wait import until
from tests.unit.gateway.calls import GENERATE, ok, post
from tests.unit.gateway.cluster import Address, House, house, joining, second_gateway

from antiphon.config.gateway import SessionsConfig
from antiphon.gateway import peers
from antiphon.gateway.sessions import SessionParams, Sessions, session_store
from antiphon.service.clock import SystemClock
from antiphon.wire.base import Role
from antiphon.wire.ids import DEFAULT_TENANT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

OUTPUT = [10, 11, 12, 13]
"""Ids of the tokens that the cluster generates."""
SESSION = {"session_id": "s"}
Pair = tuple[House, Address]


@asynccontextmanager
async def pair(server: NatsServer, *, store: bool = True) -> AsyncIterator[Pair]:
    config = SessionsConfig(store=store)
    async with house(joining(server), sessions=config) as first, second_gateway(first) as other:
        yield first, other


@pytest.fixture
async def two(server: NatsServer) -> AsyncIterator[Pair]:
    async with pair(server) as both:
        yield both


async def status_of(
    at: House | Address, text: str, rid: str | None = None, *, after: str = "", stream: bool = False
) -> int:
    """The status of a request in the session, after another request of it."""
    place = {"id": "s", "rid": after} if after else {"id": "s"}
    body = {"text": text, "rid": rid, "stream": stream, "session_params": place}
    return (await post(at, GENERATE, body)).status


@pytest.mark.parametrize("stream", [False, True])
async def test_session_continues_at_the_other_gateway(two: Pair, stream: bool) -> None:
    first, other = two
    assert await ok(first, "/open_session", SESSION) == "s"
    assert (await post(other, "/open_session", SESSION)).status == 400
    assert await status_of(other, "ab", "1", stream=stream) == 200
    assert await status_of(first, "c", "2", after="1", stream=stream) == 200
    assert first.cluster.prompt == [97, 98, *OUTPUT, 99]
    assert await status_of(other, "d", "3", after="2", stream=stream) == 200
    assert first.cluster.prompt == [97, 98, *OUTPUT, 99, *OUTPUT, 100]
    await ok(other, "/close_session", SESSION)
    assert await status_of(first, "e", after="1") == 400


async def test_request_at_the_other_gateway_is_aborted_when_its_session_closes(two: Pair) -> None:
    first, other = two
    await ok(first, "/open_session", SESSION)
    first.cluster.hold_at = 1
    async with asyncio.TaskGroup() as group:
        body = {"text": "a", "rid": "x", "session_params": {"id": "s"}}
        task = group.create_task(ok(other, GENERATE, body))
        await until(lambda: len(first.cluster.submits) == 1)
        await ok(first, "/close_session", SESSION)
    assert task.result()["meta_info"]["finish_reason"]["type"] == "abort"


async def test_request_of_a_dead_gateway_is_forgotten(
    two: Pair, server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, other = two
    await ok(first, "/open_session", SESSION | {"capacity_of_str_len": 40})
    assert await status_of(first, "a", "1") == 200
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
    assert await status_of(other, "c" * 20, "3", after="1") == 400, "there is no room"
    assert await status_of(other, "c", "3", after="2") == 400, "it has not ended"
    monkeypatch.setattr(peers, "SETTLE_S", 0.0)
    assert await status_of(first, "c" * 20, "2", after="1") == 200
    assert first.cluster.prompt == [97, *OUTPUT, *b"c" * 20]


async def never(*_: object) -> None:
    raise AssertionError("nothing is aborted")


async def test_session_outlives_the_gateway_that_opened_it(server: NatsServer) -> None:
    async with pair(server) as (first, _):
        await ok(first, "/open_session", SESSION)
        assert await status_of(first, "a", "1") == 200
    async with pair(server) as (first, other):
        assert await status_of(other, "b", after="1") == 200
        assert first.cluster.prompt == [97, *OUTPUT, 98]


async def test_without_a_durable_broker_a_session_is_refused_for_now() -> None:
    async with NatsServer() as plain, pair(plain) as (first, _):
        assert (await post(first, "/open_session", SESSION)).status == 503


async def test_in_memory_a_session_is_known_where_it_was_opened(server: NatsServer) -> None:
    async with pair(server, store=False) as (first, other):
        await ok(first, "/open_session", SESSION)
        assert await status_of(first, "a", "1") == 200
        assert await status_of(other, "b", after="1") == 400
