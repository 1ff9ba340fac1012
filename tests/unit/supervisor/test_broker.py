"""The supervisor's nats-server comes back where its clients look for it."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

from antiphon.bus.server import name_at
from antiphon.supervisor.broker import Broker
from antiphon.supervisor.ports import free_port, is_free

if TYPE_CHECKING:
    from pathlib import Path


async def test_a_killed_broker_is_back_at_the_same_port(tmp_path: Path):
    broker = Broker(tmp_path, "", payload_bytes_max=1024 * 1024)
    await broker.start()
    first = broker.running
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        keep = group.create_task(broker.keep_running())
        first.process.kill()
        while broker.running is first:  # noqa: ASYNC110  # nothing else reports a restart
            await asyncio.sleep(0.01)
        keep.cancel()
    assert broker.running.url == first.url
    assert await name_at(first.url) is not None
    await broker.stop()
    assert await name_at(first.url) is None


async def test_a_port_that_is_taken_at_the_last_moment_is_given_up(tmp_path: Path):
    port = free_port("127.0.0.1")
    broker = Broker(tmp_path, "", payload_bytes_max=1024 * 1024, port=port)
    with socket.create_server(("127.0.0.1", port)):
        await broker.start()
    assert not broker.running.url.endswith(f":{port}")
    assert await name_at(broker.running.url) is not None
    await broker.stop()


async def test_a_broker_that_never_came_up_is_stopped_all_the_same(tmp_path: Path):
    port = free_port("127.0.0.1")
    await Broker(tmp_path, "", payload_bytes_max=1024 * 1024, port=port).stop()
    assert is_free("127.0.0.1", port)
