"""The fetch protocol, and fetching claimed blobs: their size and checksum are verified."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import socket
from typing import TYPE_CHECKING, Final

from antiphon.wire.errors import InvalidRequest, RequestTooLarge, Unavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.wire.claim import Claim

HELLO: Final = b"APT1"
TOKEN_BYTES: Final = 16
SIZE_BYTES: Final = 8
GONE: Final = b"\xff" * SIZE_BYTES
"""Sent in place of a size: the token is unknown or expired."""

HASH_INLINE_BYTES = 256 * 1024
"""More than this is hashed in a thread: it would block the event loop for over 0.2 ms."""


class ConnectionClosed(Exception):
    """The other side closed the connection before the end of a frame."""


class BlobGone(Unavailable):
    """The holder no longer has the bytes, or cannot be reached."""


class BlobCorrupt(Unavailable):
    """The received size or checksum differs from the claim."""


async def fetch(claim: Claim, *, timeout_s: float, bytes_max: int) -> bytearray:
    (data,) = await fetch_all([claim], timeout_s=timeout_s, bytes_max=bytes_max)
    return data


async def fetch_all(
    claims: Sequence[Claim], *, timeout_s: float, bytes_max: int
) -> list[bytearray]:
    """Fetch several claims of one address over one connection, in order.

    `timeout_s` covers all of them; `bytes_max` of one claim is checked before anything is sent.

    Raises:
        RequestTooLarge: A claim exceeds `bytes_max`.
        InvalidRequest: The claims have several addresses, or are malformed.
        BlobGone: The holder cannot be reached, no longer has a blob, or was too slow.
        BlobCorrupt: Size or checksum differs from the claim.
    """
    blobs: list[bytearray] = []
    await _fetch_into(blobs, claims, timeout_s=timeout_s, bytes_max=bytes_max)
    return blobs


async def fetch_prefix(
    claims: Sequence[Claim], *, timeout_s: float, bytes_max: int
) -> list[bytearray]:
    """Fetch as `fetch_all` does, up to the first claim that is gone or corrupt."""
    blobs: list[bytearray] = []
    with contextlib.suppress(BlobGone, BlobCorrupt):
        await _fetch_into(blobs, claims, timeout_s=timeout_s, bytes_max=bytes_max)
    return blobs


async def _fetch_into(
    blobs: list[bytearray], claims: Sequence[Claim], *, timeout_s: float, bytes_max: int
) -> None:
    if not claims:
        return
    address = claims[0].address
    for claim in claims:
        if claim.size_bytes > bytes_max:
            raise RequestTooLarge.of(size_bytes=claim.size_bytes, bytes_max=bytes_max)
        if claim.address != address:
            raise InvalidRequest("claims of one fetch have several addresses")
    tokens = [_token(claim) for claim in claims]
    host, port = _host_and_port(address)
    try:
        async with asyncio.timeout(timeout_s):
            await _fetch(host, port, claims, tokens, blobs)
    except (ConnectionClosed, TimeoutError, OSError) as error:
        raise BlobGone(f"{address} did not send what it claimed to hold") from error


async def _fetch(
    host: str, port: int, claims: Sequence[Claim], tokens: Sequence[bytes], blobs: list[bytearray]
) -> None:
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as connection:
        connection.setblocking(False)  # noqa: FBT003  # the name says it
        await loop.sock_connect(connection, (host, port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await write(connection, HELLO)
        for claim, token in zip(claims, tokens, strict=True):
            await write(connection, token)
            blobs.append(await _receive(connection, claim))


async def _receive(connection: socket.socket, claim: Claim) -> bytearray:
    size = bytes(await read_exactly(connection, SIZE_BYTES))
    if size == GONE:
        raise BlobGone(f"{claim.address} has it no longer")
    if int.from_bytes(size, "little") != claim.size_bytes:
        raise BlobCorrupt(f"{claim.address} sends another size than it claimed")
    data = await read_exactly(connection, claim.size_bytes)
    if len(data) > HASH_INLINE_BYTES:
        digest = await asyncio.to_thread(_digest, data)
    else:
        digest = _digest(data)
    if not hmac.compare_digest(digest, claim.digest):
        raise BlobCorrupt(f"{claim.address} sent bytes with another checksum than it claimed")
    return data


def new_token() -> str:
    return secrets.token_hex(TOKEN_BYTES)


async def read_exactly(connection: socket.socket, size: int) -> bytearray:
    """Read a frame of known size into one buffer, without copies; raises `ConnectionClosed`."""
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
    await asyncio.get_running_loop().sock_sendall(connection, data)


def _digest(data: bytearray) -> bytes:
    return hashlib.sha256(data).digest()


def _token(claim: Claim) -> bytes:
    try:
        return bytes.fromhex(claim.token)
    except ValueError as error:
        raise InvalidRequest("a claim's token is not hexadecimal") from error


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise InvalidRequest(f"a claim's address is not host:port: {address}")
    return host, int(port)
