"""The supervisor's nats-server comes back where its clients look for it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from antiphon.bus.server import name_at
from antiphon.supervisor.broker import Broker

if TYPE_CHECKING:
    from pathlib import Path


async def test_a_killed_broker_is_back_at_the_same_port(tmp_path: Path):
    broker = Broker(tmp_path, "", payload_bytes_max=1024 * 1024)
    await broker.start()
    first = broker.running
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        keep = group.create_task(broker.keep())
        first.process.kill()
        while broker.running is first:  # noqa: ASYNC110  # nothing tells of a restart but itself
            await asyncio.sleep(0.01)
        keep.cancel()
    assert broker.running.url == first.url
    assert await name_at(first.url) is not None
    await broker.stop()
    assert await name_at(first.url) is None
