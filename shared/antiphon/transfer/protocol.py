"""Framing of the fetch protocol, and socket reads and writes of whole frames."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import socket

HELLO: Final = b"APT1"
TOKEN_BYTES: Final = 16
SIZE_BYTES: Final = 8
GONE: Final = b"\xff" * SIZE_BYTES
"""Sent in place of a size: the token is unknown or expired."""


class ConnectionClosed(Exception):
    """The other side closed the connection before the end of a frame."""


def new_token() -> str:
    """Create an unguessable token: 32 hexadecimal digits."""
    return secrets.token_hex(TOKEN_BYTES)


async def read_exactly(connection: socket.socket, size: int) -> bytearray:
    """Read a frame of known size into one buffer, without copies.

    Raises:
        ConnectionClosed: The connection ended before.
    """
    loop = asyncio.get_running_loop()
    data = bytearray(size)
    rest = memoryview(data)
    while rest:
        count = await loop.sock_recv_into(connection, rest)
        if count == 0:
            raise ConnectionClosed
        rest = rest[count:]
    return data


async def write(connection: socket.socket, data: bytes | bytearray | memoryview) -> None:
    """Write all of `data`."""
    await asyncio.get_running_loop().sock_sendall(connection, data)
