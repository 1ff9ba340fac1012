"""An HTTP server on a port that was taken before anything else was done."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from aiohttp import web

from antiphon.service.sockets import bind

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from ssl import SSLContext


@asynccontextmanager
async def web_server(
    runner: web.AppRunner, host: str, port: int, tls: SSLContext | None = None
) -> AsyncGenerator[int]:
    """Answer while inside; gives the port, for 0 the one that was free.

    Raises:
        CannotStart: The port is taken, or the address is not ours.
    """
    listening = bind(host, port)
    bound: int = listening.getsockname()[1]
    await runner.setup()
    try:
        await web.SockSite(runner, listening, ssl_context=tls).start()
        yield bound
    finally:
        await runner.cleanup()
        listening.close()
