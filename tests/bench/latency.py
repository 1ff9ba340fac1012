"""Latency that the services add: from the gateway to the first SSE byte, and where it goes.

Expected before measuring: a bus hop costs 0.15-0.2 ms and a call two of them. Encode is a call
(0.35 ms and 0.1 ms of work), submit is a call (0.35), then admit, tokens and text are a hop each
(0.5), and HTTP itself takes about 0.5 ms: 2 ms in all. The target is 5 ms at the median.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp
from tests.bench.figures import Figure, figure

if TYPE_CHECKING:
    from pathlib import Path

    from tests.bench.services import EchoStack

WARM_UP = 30
REQUESTS = 300
BODY = {
    "model": "antiphon-small",
    "stream": True,
    "max_tokens": 4,
    "messages": [{"role": "user", "content": "What colour is the sky? " * 4}],
}
HOPS = {
    "encode_ms": "gateway to tokenizer and back",
    "submit_ms": "gateway to leader and back",
    "queue_ms": "leader to worker to detokenizer to gateway",
}


@dataclass(frozen=True)
class Latency:
    """Time to the first SSE byte, seen by the client, and its parts, seen by the gateway."""

    first_byte_ms: Figure
    hops_ms: dict[str, Figure]


def measure(stack: EchoStack) -> Latency:
    """Ask one question after the other."""
    first = asyncio.run(_ask(stack.url))
    lines = [json.loads(line) for line in _log(stack.logs)]
    ended = [line for line in lines if line.get("event") == "request ended"][-REQUESTS:]
    assert len(ended) == REQUESTS, f"{len(ended)} requests in the gateway's log"
    hops = {name: figure([line[name] for line in ended]) for name in HOPS}
    inside = [line["first_ms"] for line in ended]
    hops["http_ms"] = figure([whole - part for whole, part in zip(first, inside, strict=True)])
    return Latency(figure(first), hops)


async def _ask(url: str) -> list[float]:
    times: list[float] = []
    async with aiohttp.ClientSession() as session:
        for n in range(WARM_UP + REQUESTS):
            began = time.perf_counter()
            async with session.post(f"{url}/v1/chat/completions", json=BODY) as answer:
                assert answer.status == 200, await answer.text()
                await answer.content.readany()
                took = (time.perf_counter() - began) * 1000
                await answer.read()
            if n >= WARM_UP:
                times.append(took)
    return times


def _log(logs: Path) -> list[str]:
    return (logs / "gateway-0.log").read_text().splitlines()
