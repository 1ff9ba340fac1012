"""Serves blobs over TCP to whoever has their token."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING

from antiphon.transfer.protocol import (
    GONE,
    HELLO,
    SIZE_BYTES,
    TOKEN_BYTES,
    Hangup,
    read_exactly,
    write,
)

if TYPE_CHECKING:
    from antiphon.transfer.shelf import BlobSource

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 256
IDLE_TIMEOUT_S = 60.0
SEND_TIMEOUT_S = 60.0


class BlobServer:
    """Answers fetches on a bound socket, which its caller closes after `run` was cancelled."""

    def __init__(self, bound: socket.socket, source: BlobSource) -> None:
        self._bound = bound
        self._source = source
        self._places = asyncio.Semaphore(CONNECTIONS_MAX)

    async def run(self) -> None:
        """Accept connections; one more than `CONNECTIONS_MAX` waits in the kernel's queue."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            while True:
                await self._places.acquire()
                connection, _ = await loop.sock_accept(self._bound)
                group.create_task(self._serve(connection))

    async def _serve(self, connection: socket.socket) -> None:
        """Answer one connection until the other side is done, silent or wrong."""
        try:
            with connection:
                connection.setblocking(False)  # noqa: FBT003  # the name says it
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                async with asyncio.timeout(IDLE_TIMEOUT_S):
                    hello = bytes(await read_exactly(connection, len(HELLO)))
                if hello != HELLO:
                    log.warning("fetch refused", extra={"hello": hello.hex()})
                    return
                while True:
                    await self._answer(connection)
        except (Hangup, TimeoutError, OSError):
            return  # the fetcher sees it too, and it alone knows whether it matters
        finally:
            self._places.release()

    async def _answer(self, connection: socket.socket) -> None:
        async with asyncio.timeout(IDLE_TIMEOUT_S):
            token = await read_exactly(connection, TOKEN_BYTES)
        data = self._source.get(token.hex())
        async with asyncio.timeout(SEND_TIMEOUT_S):
            if data is None:
                await write(connection, GONE)
            else:
                await write(connection, len(data).to_bytes(SIZE_BYTES, "little"))
                await write(connection, data)
