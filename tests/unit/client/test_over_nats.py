"""The client over a real nats-server that dies in the middle of an answer."""

from __future__ import annotations

import asyncio

import pytest
from tests.support.nats import NatsServer
from tests.support.services import CLUSTER
from tests.support.wait import until
from tests.unit.client.gateway import MODEL, gateway

from antiphon.bus.nats import NatsTransport
from antiphon.client import Client
from antiphon.config.settings import BusConfig
from antiphon.wire.errors import Unavailable


async def test_a_broker_that_dies_and_comes_back_loses_no_byte() -> None:
    async with (
        NatsServer() as server,
        gateway(NatsTransport(BusConfig(url=server.url), name="gateway")) as fake,
        Client(server.url, cluster=CLUSTER) as client,
        asyncio.TaskGroup() as group,
    ):
        pieces = client.generate(MODEL, "hi", timeout_s=20)
        first = group.create_task(anext(pieces))
        await until(lambda: bool(fake.requests))
        (request,) = fake.requests
        await fake.say(request, "before, ")
        assert (await first).text == "before, "
        await server.kill()
        await until(lambda: not fake.bus.link.up)
        request.said.append("meanwhile, ")  # generated while no subscriber was connected
        await server.start()
        await until(lambda: fake.bus.link.up)
        await fake.say(request, "after")
        await fake.finish(request)
        assert "".join([piece.text async for piece in pieces]) == "meanwhile, after"
        assert not request.cancelled.is_set()


async def test_request_without_responders_fails_at_once() -> None:
    async with NatsServer() as server, Client(server.url, cluster=CLUSTER) as client:
        async with asyncio.timeout(1):
            with pytest.raises(Unavailable, match="no gateway serves this model"):
                await client.complete(MODEL, "hi")
