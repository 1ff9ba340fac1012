"""A relay between a client and the gateway, which notes when each answer's pieces come.

With it, the first turn of a client on a real model, which reads long prompts slowly."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import aiohttp
from aiohttp import web
from tests.clients.programs import running_on_loopback

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from tests.system.stack import Stack

_PASSED_ON = ("Content-Type", "Retry-After")
_DROPPED = {"host", "content-length", "transfer-encoding", "connection", "accept-encoding"}


@dataclass
class Exchange:
    """One request and its answer.

    Attributes:
        path: What was asked for.
        status: Of the answer.
        content_type: Of the answer.
        headers_s: Time from the request to the answer's headers.
        silence_max_s: Longest time from one piece of the body to the next, the headers included.
        body: The answer, as far as it came.
    """

    path: str
    status: int
    content_type: str
    headers_s: float
    silence_max_s: float = 0.0
    body: bytearray = field(default_factory=bytearray)


class Relay:
    def __init__(self, target: str) -> None:
        self._target = target
        self.url = ""
        self._answered = asyncio.Queue[Exchange]()

    async def answer(self, path: str) -> Exchange:
        """Wait for the next answer on a path that has come whole, and return it."""
        while (exchange := await self._answered.get()).path != path:
            pass
        return exchange

    async def pass_on(self, request: web.Request) -> web.StreamResponse:
        """Send a request on, and its answer back piece by piece."""
        headers = {name: v for name, v in request.headers.items() if name.lower() not in _DROPPED}
        body = await request.read()
        began = time.monotonic()
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
            session.request(
                request.method, f"{self._target}{request.path_qs}", headers=headers, data=body
            ) as answer,
        ):
            last = time.monotonic()
            exchange = Exchange(request.path, answer.status, answer.content_type, last - began)
            kept = {name: answer.headers[name] for name in _PASSED_ON if name in answer.headers}
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                now = time.monotonic()
                exchange.silence_max_s = max(exchange.silence_max_s, now - last)
                exchange.body += piece
                last = now
                await response.write(piece)
            self._answered.put_nowait(exchange)
            await response.write_eof()
            return response


@asynccontextmanager
async def relay_to(target: str) -> AsyncIterator[Relay]:
    relay = Relay(target)
    app = web.Application(client_max_size=0)
    app.router.add_route("*", "/{path:.*}", relay.pass_on)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0]
        relay.url = f"http://{host}:{port}"
        yield relay
    finally:
        async with asyncio.timeout(10):
            await runner.cleanup()


TURN_S = 600
HEADERS_S = 1.0
SILENCE_S = 11.0
"""A comment or a ping comes each 10 s where nothing else does."""


async def first_turn(
    engine: Stack,
    client: Callable[[str], tuple[list[str], dict[str, str]]],
    path: str,
    folder: Path,
) -> Exchange:
    """Run a client until the first answer from `path` has come whole; return that answer.

    Raises:
        AssertionError: The answer is an error, or its client had to wait too long for a sign.
    """
    async with relay_to(engine.url) as relay:
        command, environment = client(relay.url)
        with running_on_loopback(command, folder=folder, environment=environment):
            return await answered_in_time(relay, path)


async def answered_in_time(relay: Relay, path: str) -> Exchange:
    """Wait for the first answer from `path` that comes whole; return it.

    One that is not a stream has its headers when it is ready.

    Raises:
        AssertionError: The answer is an error, or its client had to wait too long for a sign.
    """
    async with asyncio.timeout(TURN_S):
        first = await relay.answer(path)
    assert first.status == 200, first.body.decode()
    if first.content_type == "application/json":
        return first
    assert first.headers_s < HEADERS_S, f"the headers came after {first.headers_s:.1f} s"
    assert first.silence_max_s < SILENCE_S, f"{first.silence_max_s:.1f} s without a sign"
    return first
