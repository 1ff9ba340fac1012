"""Fetches many blobs over one connection, in a thread: for pages, of which a prompt has hundreds.

Tokens are sent before the first response is read, so a round trip is paid once. While one blob
is verified, the next ones arrive in the kernel's buffers.
"""

from __future__ import annotations

import socket
import struct
import time
from typing import TYPE_CHECKING

from antiphon.transfer.blobs import GONE, HELLO, SIZE_BYTES, host_and_port, token_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from antiphon.wire.claim import Claim

REQUESTS_MAX = 1024
"""Sent ahead of their responses: 16 KiB, which fit in the kernel's buffers. With more, both sides
might wait for the other one to read."""
_TIMEVAL = struct.Struct("@ll")


def stream_blobs(
    claims: Sequence[Claim], *, timeout_s: float, kept: bool = False
) -> Iterator[memoryview]:
    """Fetch claims of one address, in order; blocks. The connection ends with the iterator.

    Each blob is valid until the next one is asked for, or is `kept`, in a bytearray of its own. It
    is not verified: the consumer compares its checksum with the claim. Iteration ends at the first
    blob that is gone, has another size than claimed, or has not arrived within `timeout_s` of the
    start.

    Raises:
        InvalidRequest: The claims are malformed.
    """
    if not claims:
        return
    tokens = [token_bytes(claim) for claim in claims]
    due = time.monotonic() + timeout_s
    most = 0 if kept else max(claim.size_bytes for claim in claims)
    buffer = memoryview(bytearray(most))  # one that stays in the cache of the processor
    size = memoryview(bytearray(SIZE_BYTES))
    try:
        with socket.create_connection(
            host_and_port(claims[0].address), timeout=timeout_s
        ) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(None)  # the kernel's own is set before each receive
            connection.sendall(b"".join((HELLO, *tokens[:REQUESTS_MAX])))
            for index, claim in enumerate(claims):
                _receive(connection, size, due)
                if bytes(size) == GONE or int.from_bytes(size, "little") != claim.size_bytes:
                    return
                size_bytes = claim.size_bytes
                blob = memoryview(bytearray(size_bytes)) if kept else buffer[:size_bytes]
                _receive(connection, blob, due)
                if index + REQUESTS_MAX < len(tokens):
                    connection.sendall(tokens[index + REQUESTS_MAX])
                yield blob
    except OSError:
        return


def _receive(connection: socket.socket, target: memoryview, due: float) -> None:
    """Fill the target; a closed connection and a deadline are OSErrors.

    In one call: by Python's own timeouts each piece that arrives would cost three.
    """
    left_s = due - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    seconds, rest = divmod(left_s, 1)
    limit = _TIMEVAL.pack(int(seconds), max(1, int(rest * 1e6)))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    if connection.recv_into(target, flags=socket.MSG_WAITALL) < len(target):
        raise ConnectionResetError
