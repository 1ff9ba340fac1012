"""Socket writes from any thread of the process."""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio


class ThreadSafeWriter:
    """Writes to the socket of a transport: immediately, completely, and in the order of the calls.

    An asyncio transport may be written to only from its event loop's thread: other threads would
    have to wake the loop, which writes at the end of its iteration. While this writer exists, the
    transport itself must not be written to.

    Bytes that the kernel does not accept at once are queued here, and the event loop writes them.
    When the connection is lost, written bytes are lost, too; the reader of the socket detects it.
    """

    def __init__(self, transport: asyncio.BaseTransport, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        # A duplicate: once the transport closes its descriptor, the number may be reused.
        descriptor = os.dup(transport.get_extra_info("socket").fileno())
        self._socket: socket.socket | None = socket.socket(fileno=descriptor)
        self._pending: deque[bytes] = deque()
        self._pending_bytes = 0

    def write(self, data: bytes) -> None:
        """Write, from any thread, without waiting."""
        with self._lock:
            if self._socket is None:
                return
            if not self._pending:
                sent = _send(self._socket, data)
                if sent == len(data):
                    return
                data = data[sent:]
                with suppress(RuntimeError):  # the loop is closed: nothing will write it
                    self._loop.call_soon_threadsafe(self._watch)
            self._pending.append(data)
            self._pending_bytes += len(data)

    def get_write_buffer_size(self) -> int:
        """Return the number of bytes that the kernel has not accepted yet."""
        return self._pending_bytes

    def close(self) -> None:
        """Stop writing and drop queued bytes. In the event loop's thread; idempotent."""
        with self._lock:
            closed, self._socket = self._socket, None
            self._pending.clear()
            self._pending_bytes = 0
        if closed is not None:
            self._loop.remove_writer(closed.fileno())
            closed.close()

    def _watch(self) -> None:
        if self._socket is not None:
            self._loop.add_writer(self._socket.fileno(), self._write_pending)

    def _write_pending(self) -> None:
        """Write queued bytes, as many as the kernel accepts."""
        with self._lock:
            while self._socket is not None and self._pending:
                data = self._pending.popleft()
                sent = _send(self._socket, data)
                self._pending_bytes -= sent
                if sent < len(data):
                    self._pending.appendleft(data[sent:])
                    return
            if self._socket is not None:
                self._loop.remove_writer(self._socket.fileno())


def _send(to: socket.socket, data: bytes) -> int:
    """Send and return how many bytes the socket accepted.

    A broken socket counts as having accepted all; it is shut down for its reader, too, so that no
    message can follow half of another one.
    """
    try:
        return to.send(data)
    except BlockingIOError:
        return 0
    except OSError:
        with suppress(OSError):
            to.shutdown(socket.SHUT_RDWR)
        return len(data)
