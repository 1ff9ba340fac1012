"""A TCP connection to a broker that can be cut, and that loses messages."""

from __future__ import annotations

import asyncio
import urllib.parse
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable


class NatsLink:
    """Relays the connections of clients to a broker.

    Attributes:
        url: Where clients connect.
        up: Whether connections are accepted.
        loses: Whether a message to a client is lost, by its headers and payload.
    """

    def __init__(self, nats_url: str) -> None:
        self.url = ""
        self.up = True
        self.loses: Callable[[bytes], bool] = lambda _: False
        self._broker = urllib.parse.urlsplit(nats_url)
        self._writers: list[asyncio.StreamWriter] = []

    def cut(self) -> None:
        """Close all connections, and accept none until `up` is set again."""
        self.up = False
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.up:
            writer.close()
            return
        there, broker = await asyncio.open_connection(self._broker.hostname, self._broker.port)
        self._writers += [writer, broker]
        async with asyncio.TaskGroup() as group:
            group.create_task(self._to_broker(reader, broker))
            group.create_task(self._to_client(there, writer))

    async def _to_broker(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        writer.close()

    async def _to_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                payload = b""
                if line.startswith((b"MSG ", b"HMSG ")):
                    payload = await reader.readexactly(int(line.split()[-1]) + len(b"\r\n"))
                    if self.loses(payload):
                        continue
                writer.write(line + payload)
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        writer.close()


@asynccontextmanager
async def linked(nats_url: str) -> AsyncGenerator[NatsLink]:
    """A link to a broker."""
    link = NatsLink(nats_url)
    server = await asyncio.start_server(link.relay, "127.0.0.1", 0)
    link.url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield link
    finally:
        server.close()
        link.cut()
