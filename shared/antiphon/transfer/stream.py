"""Fetches many blobs over one connection, in a thread: for pages, of which a prompt has hundreds.

Tokens are sent before the first response is read, so a round trip is paid once. While one blob
is verified, the next ones arrive in the kernel's buffers.
"""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING, TypeVar

from antiphon.transfer.blobs import (
    GONE,
    HELLO,
    PIECES_MAX,
    SIZE_BYTES,
    host_and_port,
    receive_into,
    token_bytes,
)
from antiphon.transfer.memory import views_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from antiphon.transfer.memory import BlobData, ChunkPool, PooledBlob
    from antiphon.wire.claim import Claim

REQUESTS_MAX = 1024
"""Sent ahead of their responses: 16 KiB, which fit in the kernel's buffers. With more, both sides
might wait for the other one to read."""

Target = TypeVar("Target", bound="BlobData")


def stream_blobs(claims: Sequence[Claim], *, timeout_s: float) -> Iterator[memoryview]:
    """Fetch claims of one address, in order; blocks. The connection ends with the iterator.

    Each blob is valid until the next one is asked for. It is not verified: the consumer compares
    its checksum with the claim. Iteration ends at the first blob that is gone, has another size
    than claimed, or has not arrived within `timeout_s` of the start.

    Raises:
        InvalidRequest: The claims are malformed.
    """
    # One buffer, which stays in the cache of the processor.
    buffer = memoryview(bytearray(max((claim.size_bytes for claim in claims), default=0)))
    return _stream(claims, timeout_s, lambda size_bytes: buffer[:size_bytes])


def receive_blobs(
    claims: Sequence[Claim], pool: ChunkPool, *, timeout_s: float
) -> Iterator[PooledBlob]:
    """Like `stream_blobs`, but each blob lies in memory of its own, which is taken from a pool."""
    return _stream(claims, timeout_s, pool.take)


def _stream(
    claims: Sequence[Claim], timeout_s: float, take: Callable[[int], Target]
) -> Iterator[Target]:
    if not claims:
        return
    tokens = [token_bytes(claim) for claim in claims]
    due = time.monotonic() + timeout_s
    size = memoryview(bytearray(SIZE_BYTES))
    try:
        with socket.create_connection(
            host_and_port(claims[0].address), timeout=timeout_s
        ) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(None)  # the kernel's own is set before each receive
            connection.sendall(b"".join((HELLO, *tokens[:REQUESTS_MAX])))
            for index, claim in enumerate(claims):
                receive_into(connection, (size,), due)
                if bytes(size) == GONE or int.from_bytes(size, "little") != claim.size_bytes:
                    return
                blob = take(claim.size_bytes)
                views = views_of(blob)
                for start in range(0, len(views), PIECES_MAX):
                    receive_into(connection, views[start : start + PIECES_MAX], due)
                if index + REQUESTS_MAX < len(tokens):
                    connection.sendall(tokens[index + REQUESTS_MAX])
                yield blob
    except OSError:
        return
