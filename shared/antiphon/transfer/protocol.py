"""The few bytes that frame a fetch, and socket calls that read and write whole pieces."""

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
"""In place of a size: the bytes are not here, or not any more."""


class ConnectionClosed(Exception):
    """The other side closed the connection in the middle of a piece, or before it."""


def new_token() -> str:
    """Name bytes so that nobody can guess it: 32 hexadecimal digits."""
    return secrets.token_hex(TOKEN_BYTES)


async def read_exactly(connection: socket.socket, size: int) -> bytearray:
    """Read a piece of known size into one buffer, without copies.

    Raises:
        Hangup: The connection ended before.
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
    """Write a whole piece."""
    await asyncio.get_running_loop().sock_sendall(connection, data)
