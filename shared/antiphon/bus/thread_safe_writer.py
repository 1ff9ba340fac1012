"""The way out of a socket, for every thread of the process."""

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
    """Writes to the socket of a transport: at once, whole, and in the order of the calls.

    A transport may be written to from its event loop's thread alone, so that whoever computes in
    another one has to wake that first; it writes at the end of a turn. Nobody may write to the
    transport itself besides.

    What the system does not take at once waits here, and the event loop writes it. Where the
    connection is lost, what is written is lost, too: who reads from the socket learns of it.
    """

    def __init__(self, transport: asyncio.BaseTransport, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        # By a number of our own: the transport's is somebody else's as soon as it has closed it.
        number = os.dup(transport.get_extra_info("socket").fileno())
        self._socket: socket.socket | None = socket.socket(fileno=number)
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
                with suppress(RuntimeError):  # nobody is there to write it: the loop is closed
                    self._loop.call_soon_threadsafe(self._watch)
            self._pending.append(data)
            self._pending_bytes += len(data)

    def get_write_buffer_size(self) -> int:
        """Bytes that the system has not taken yet."""
        return self._pending_bytes

    def close(self) -> None:
        """Write nothing more, what waits included. In the event loop's thread; idempotent."""
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
        """Write what waits, as much as the system takes."""
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
    """How many bytes a socket has taken.

    All of them if it is broken: then it ends for whoever reads from it, too, lest half a message
    be followed by another one.
    """
    try:
        return to.send(data)
    except BlockingIOError:
        return 0
    except OSError:
        with suppress(OSError):
            to.shutdown(socket.SHUT_RDWR)
        return len(data)
