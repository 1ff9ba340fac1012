"""A running gateway, for the tests that need no settings of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.support.nats import NatsServer
from tests.unit.gateway.calls import CALL
from tests.unit.gateway.cluster import House, house

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def at() -> AsyncIterator[House]:
    async with house() as world:
        yield world


@pytest.fixture
async def server() -> AsyncIterator[NatsServer]:
    """A broker that keeps streams."""
    async with NatsServer(durable=True) as started:
        yield started


@pytest.fixture
async def thinking() -> AsyncIterator[House]:
    """A gateway whose model writes reasoning, text and a call."""
    async with house(tool_call_parser="hermes", reasoning_parser="qwen3") as world:
        thought = ("<thi", "nk>Where?", "</think>")
        world.cluster.script = (*thought, "Let me see. ", CALL[:8], CALL[8:40], CALL[40:], "")
        yield world
