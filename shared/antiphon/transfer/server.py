"""Hold blobs, bounded in size and time, and serve them over TCP to clients with their token."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from antiphon.transfer.fetch import (
    GONE,
    HELLO,
    SIZE_BYTES,
    TOKEN_BYTES,
    ConnectionClosed,
    new_token,
    read_exactly,
    write,
)
from antiphon.wire.claim import Claim
from antiphon.wire.errors import Overloaded, RequestTooLarge

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 256
ACCEPT_PAUSE_S = 0.1
"""Delay after an `accept` error: without free file descriptors the next one would fail, too."""
LOG_PAUSE_S = 10.0
IDLE_TIMEOUT_S = 60.0
SEND_TIMEOUT_S = 60.0


class BlobSource(Protocol):
    """Source of the blobs of a `BlobServer`."""

    def get(self, token: str) -> bytes | bytearray | memoryview | None: ...


@dataclass(frozen=True, slots=True)
class Blob:
    data: bytes
    expires_unix_ms: int


class BlobStore:
    """Holds bytes under unguessable tokens until they expire.

    `address` is `host:port` of the blob server that serves this store, `unix_ms` the wall clock.
    """

    def __init__(self, address: str, bytes_max: int, unix_ms: Callable[[], int]) -> None:
        self._address = address
        self._bytes_max = bytes_max
        self._unix_ms = unix_ms
        self._blobs: dict[str, Blob] = {}
        self._bytes = 0

    @property
    def bytes_held(self) -> int:
        return self._bytes

    def put(self, data: bytes, lifetime_s: float, *, checksum: bytes | None = None) -> Claim:
        """Store bytes, which are not copied, and return the claim to fetch them.

        `checksum` is their SHA-256, if known: hashing megabytes here would block the event loop.

        Raises:
            RequestTooLarge: They would not fit into an empty store.
            Overloaded: The store is full of unexpired blobs.
        """
        if len(data) > self._bytes_max:
            raise RequestTooLarge.of(size_bytes=len(data), bytes_max=self._bytes_max)
        self.sweep()
        if self._bytes + len(data) > self._bytes_max:
            raise Overloaded("the transfer store is full; retry later", retry_after_s=1.0)
        token = new_token()
        expires = self._unix_ms() + int(lifetime_s * 1000)
        self._blobs[token] = Blob(data, expires)
        self._bytes += len(data)
        return Claim(
            address=self._address,
            token=token,
            size_bytes=len(data),
            digest=checksum or hashlib.sha256(data).digest(),
            expires_unix_ms=expires,
        )

    def get(self, token: str) -> bytes | None:
        blob = self._blobs.get(token)
        if blob is None or blob.expires_unix_ms < self._unix_ms():
            return None
        return blob.data

    def sweep(self) -> None:
        now = self._unix_ms()
        for token in [t for t, blob in self._blobs.items() if blob.expires_unix_ms < now]:
            self._bytes -= len(self._blobs.pop(token).data)


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
