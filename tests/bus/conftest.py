"""Tests that take `world` run on a real NATS server, behind a proxy, in memory, and with faults."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.bus.worlds import WORLDS, World, bus_config
from tests.support.nats import NatsServer

from antiphon.bus.nats import NatsTransport

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture(params=WORLDS)
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    async with WORLDS[request.param]() as world:
        yield world


@pytest.fixture
async def server() -> AsyncIterator[NatsServer]:
    async with NatsServer() as server:
        yield server


@pytest.fixture
async def transport(server: NatsServer) -> AsyncIterator[NatsTransport]:
    async with NatsTransport(bus_config(server.url), name="test") as transport:
        yield transport
