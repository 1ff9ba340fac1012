"""The TCP connection to a NATS server: received frames, and writes from any thread."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from nats.aio.transport import Transport

from antiphon.bus.transport import Packet, PacketCallback, dispatch_sync

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from ssl import SSLContext
    from urllib.parse import ParseResult


DEFAULT_PORT = 4222
_MESSAGE = b"MSG "
_LINE_END = b"\r\n"


def publish_frame(
    subject: str, data: bytes, reply: str | None, headers: Mapping[str, str] | None
) -> bytes:
    """The command that publishes a message."""
    # Subjects and headers are not validated: subjects come from routes and buckets, which escape
    # every name, or from the broker, and headers are our own.
    reply_field = f"{reply} " if reply else ""
    if headers is None:
        line = f"PUB {subject} {reply_field}{len(data)}\r\n"
    else:
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"NATS/1.0\r\n{lines}\r\n"
        head_bytes = len(head.encode())
        line = f"HPUB {subject} {reply_field}{head_bytes} {head_bytes + len(data)}\r\n{head}"
    return b"%b%b\r\n" % (line.encode(), data)


def dispatch_messages(
    data: bytes, receivers: Mapping[int, PacketCallback], ready: Callable[[], bool]
) -> bytes:
    """Dispatch the complete messages at the start of a read; return the remaining bytes.

    `receivers` are plain functions by subscription id. `ready` is called before each message.
    """
    at = 0
    while ready() and data.startswith(_MESSAGE, at):
        line_end = data.find(_LINE_END, at)
        words = data[at + len(_MESSAGE) : max(line_end, 0)].split(b" ")
        if line_end < 0 or len(words) not in {3, 4} or not (words[1] + words[-1]).isdigit():
            break
        begin = line_end + len(_LINE_END)
        end = begin + int(words[-1])
        receive = receivers.get(int(words[1]))
        if receive is None or end + len(_LINE_END) > len(data):
            break
        reply = text(words[2]) if len(words) == 4 else None
        dispatch_sync(receive, Packet(text(words[0]), data[begin:end], reply))
        at = end + len(_LINE_END)
    return data[at:]


def text(subject: bytes) -> str:
    """Decode a subject. Publishers to a wildcard subject may use arbitrary bytes in it."""
    return subject.decode(errors="replace")


class FrameReader(asyncio.StreamReaderProtocol):
    """Passes received bytes to `consume` first, and the rest to the stream reader."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        consume: Callable[[bytes], bytes],
        lost: Callable[[], None],
    ) -> None:
        super().__init__(reader)
        self._lost = lost
        self._unread: bytearray = reader._buffer  # noqa: SLF001  # pyright: ignore
        self._consume = consume

    def data_received(self, data: bytes) -> None:
        """Consume the bytes directly, unless earlier ones are still unread in the reader."""
        rest = data if self._unread else self._consume(data)
        if rest:
            super().data_received(rest)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the stream. nats-py reconnects at the end of a stream and on `OSError` only."""
        self._lost()
        super().connection_lost(exc if isinstance(exc, OSError) else None)


class Socket(Transport):
    """A TCP connection that passes received bytes to `consume` first and closes immediately.

    `StreamWriter.close` flushes its buffer first, so that reconnecting from a frozen or half-open
    broker would wait for that broker. Unencrypted data is written by `ThreadSafeWriter`.
    """

    def __init__(self, consume: Callable[[bytes], bytes]) -> None:
        self._consume = consume
        self._reader: asyncio.StreamReader | None = None
        self._plain: asyncio.StreamWriter | None = None
        self._encrypted: asyncio.StreamWriter | None = None
        self._outgoing: ThreadSafeWriter | None = None

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(buffer_size, loop)
        protocol = FrameReader(reader, self._consume, self._stop_writing)
        async with asyncio.timeout(connect_timeout):
            transport, _ = await loop.create_connection(
                lambda: protocol, uri.hostname or "", uri.port or DEFAULT_PORT
            )
        self._reader = reader
        self._plain = asyncio.StreamWriter(transport, protocol, reader, loop)
        if not transport.is_closing():
            self._outgoing = ThreadSafeWriter(transport, loop)

    async def connect_tls(
        self,
        uri: str | ParseResult,
        ssl_context: SSLContext,
        buffer_size: int,
        connect_timeout: int,
    ) -> None:
        """Upgrade to TLS; from here on only the event loop may write."""
        assert self._plain is not None, "connected before"
        self._stop_writing()
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(buffer_size, loop)
        protocol = asyncio.StreamReaderProtocol(reader)
        name = uri if isinstance(uri, str) else uri.hostname
        async with asyncio.timeout(connect_timeout):
            transport = await loop.start_tls(
                self._plain.transport, protocol, ssl_context, server_hostname=name
            )
        assert transport is not None, "the plain connection is open"
        self._reader = reader
        self._encrypted = asyncio.StreamWriter(transport, protocol, reader, loop)

    def write(self, payload: bytes) -> None:
        if self._encrypted is not None:
            self._encrypted.write(payload)
        elif self._outgoing is not None:
            self._outgoing.write(payload)

    def writelines(self, payload: list[bytes]) -> None:
        self.write(b"".join(payload))

    async def read(self, buffer_size: int) -> bytes:
        assert self._reader is not None, "connected before"
        return await self._reader.read(buffer_size)

    async def readline(self) -> bytes:
        assert self._reader is not None, "connected before"
        return await self._reader.readline()

    async def drain(self) -> None:
        if (streams := self._streams) is not None:
            await streams.drain()

    async def wait_closed(self) -> None:
        if (streams := self._streams) is not None:
            await streams.wait_closed()

    def close(self) -> None:
        """Close without writing buffered data; flush first to keep it."""
        self._stop_writing()
        if (streams := self._streams) is not None:
            streams.transport.abort()

    def at_eof(self) -> bool:
        return self._reader is None or self._reader.at_eof()

    def __bool__(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._plain is not None

    @property
    def writer(self) -> asyncio.WriteTransport | ThreadSafeWriter | None:
        """The open transport, if any. A `ThreadSafeWriter` may be used from any thread."""
        if self._encrypted is None:
            return self._outgoing
        return None if self._encrypted.transport.is_closing() else self._encrypted.transport

    @property
    def _streams(self) -> asyncio.StreamWriter | None:
        return self._encrypted or self._plain

    def _stop_writing(self) -> None:
        outgoing, self._outgoing = self._outgoing, None
        if outgoing is not None:
            outgoing.close()


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
    """Send and return how many bytes the socket accepted."""
    # A broken socket counts as having accepted all; it is shut down for its reader, too, so that no
    # message can follow half of another one.
    try:
        return to.send(data)
    except BlockingIOError:
        return 0
    except OSError:
        with suppress(OSError):
            to.shutdown(socket.SHUT_RDWR)
        return len(data)
