"""Serve blobs over TCP to clients that have their token."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from typing import TYPE_CHECKING

from antiphon.transfer.protocol import (
    GONE,
    HELLO,
    SIZE_BYTES,
    TOKEN_BYTES,
    ConnectionClosed,
    read_exactly,
    write,
)

if TYPE_CHECKING:
    from antiphon.transfer.blob_store import BlobSource

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 256
ACCEPT_PAUSE_S = 0.1
"""Delay after an `accept` error: without free file descriptors the next one would fail, too."""
LOG_PAUSE_S = 10.0
IDLE_TIMEOUT_S = 60.0
SEND_TIMEOUT_S = 60.0


class BlobServer:
    """Serves fetches on a bound socket, which the caller closes after `run` was cancelled."""

    def __init__(self, bound: socket.socket, source: BlobSource) -> None:
        self._bound = bound
        self._source = source
        self._slots = asyncio.Semaphore(CONNECTIONS_MAX)

    async def run(self) -> None:
        """Accept connections; beyond `CONNECTIONS_MAX` they wait in the kernel's queue."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._slots.acquire()
                group.create_task(self._serve(await self._accept()))

    async def _accept(self) -> socket.socket:
        """Wait for the next connection, retrying errors."""
        loop = asyncio.get_running_loop()
        failures, logged_at = 0, loop.time() - LOG_PAUSE_S
        while True:
            try:
                connection, _ = await loop.sock_accept(self._bound)
            except OSError as error:
                # Too many open files (EMFILE, ENFILE), no memory, or a client that disconnected
                # while queued. Open connections are served meanwhile, and free descriptors later.
                failures += 1
                if loop.time() - logged_at >= LOG_PAUSE_S:
                    logged_at = loop.time()
                    fields = {"reason": os.strerror(error.errno or 0), "failures": failures}
                    log.warning("connection not accepted", extra=fields)
                await asyncio.sleep(ACCEPT_PAUSE_S)
            else:
                if failures:
                    log.info("connections are accepted again", extra={"failures": failures})
                return connection

    async def _serve(self, connection: socket.socket) -> None:
        """Serve one connection until it is closed, idle for too long, or invalid."""
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
                    await self._send_blob(connection)
        except (ConnectionClosed, TimeoutError, OSError):
            return  # the client sees it, too, and only the client knows whether it matters
        except Exception:
            log.exception("fetch failed")  # other connections are not affected
        finally:
            self._slots.release()

    async def _send_blob(self, connection: socket.socket) -> None:
        async with asyncio.timeout(IDLE_TIMEOUT_S):
            token = await read_exactly(connection, TOKEN_BYTES)
        data = self._source.get(token.hex())
        async with asyncio.timeout(SEND_TIMEOUT_S):
            if data is None:
                await write(connection, GONE)
            else:
                await write(connection, len(data).to_bytes(SIZE_BYTES, "little"))
                await write(connection, data)
