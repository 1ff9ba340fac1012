"""CPU use of the other services beside a worker that sends 600 tokens/s to 16 clients.

Expected before measuring: 37.5 steps/s. A step is a batch through the detokenizer (0.3 ms with 16
rows) and one through the gateway, which writes 16 events (16 x 40 us): a millisecond a step, so 4 %
of a core, and 1 % for heartbeats and open lists. The target is at most 10 %.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.bench.services import EchoStack

RUNNING, TOKENS_PER_S = 16, 600
STEP_S = RUNNING / TOKENS_PER_S
SETTLE_S = 3.0
WINDOW_S = 10.0
OUTPUT_TOKENS = 100
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PROMPT = "What is there to say of a sky that is blue in the morning and red at night? " * 12


class ServicesCpu(msgspec.Struct, frozen=True):
    """Shares of one core, in percent, at a measured rate."""

    tokens_per_s: float
    services_percent: dict[str, float]

    @property
    def total_percent(self) -> float:
        """All services beside the worker."""
        return sum(self.services_percent.values())


def measure(stack: EchoStack) -> ServicesCpu:
    return asyncio.run(_measure(stack))


def used_s(pids: Mapping[str, int]) -> dict[str, float]:
    """Processor time of each process since its start, user and system."""
    return {name: _stat_s(Path(f"/proc/{pid}/stat").read_text()) for name, pid in pids.items()}


async def _measure(stack: EchoStack) -> ServicesCpu:
    heard = [0]
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        clients = [group.create_task(_listen(session, stack.url, heard)) for _ in range(RUNNING)]
        await asyncio.sleep(SETTLE_S)
        before, heard[0], began = used_s(stack.pids), 0, time.perf_counter()
        await asyncio.sleep(WINDOW_S)
        after, events, took_s = used_s(stack.pids), heard[0], time.perf_counter() - began
        for client in clients:
            client.cancel()
    shares = {
        name: round(100 * (after[name] - before[name]) / took_s, 2)
        for name in stack.pids
        if name != "worker-0"
    }
    result = ServicesCpu(round(events / took_s, 1), shares)
    assert result.tokens_per_s > 0.8 * TOKENS_PER_S, f"the stream is too slow: {result}"
    return result


async def _listen(session: aiohttp.ClientSession, url: str, heard: list[int]) -> None:
    body = {
        "model": "antiphon-small",
        "stream": True,
        "max_tokens": OUTPUT_TOKENS,
        "ignore_eos": True,
        "prompt": PROMPT,
    }
    while True:
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                heard[0] += line.startswith(b"data: {")


def _stat_s(line: str) -> float:
    user, system = line.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / TICKS_PER_S
