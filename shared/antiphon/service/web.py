"""An HTTP server on a port that is bound before any other setup."""

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
    """Serve inside the block; yields the port, which was chosen if `port` is 0.

    Raises:
        CannotStart: The port is taken, or the address is not local.
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
