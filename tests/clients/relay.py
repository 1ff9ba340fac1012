"""A relay between a client and the gateway, which notes when each answer's pieces come."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import aiohttp
from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

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
    """Answers at `url` as another server does."""

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
    """Run a relay to a server until left."""
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
