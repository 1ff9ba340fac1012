"""The nats-py client, with fixes for services that run for months.

The docstring of each override describes what nats-py 2.16 does. Only `antiphon.bus.nats` uses this.
"""

# The fixes need nats-py's protected members, which are partly untyped.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# ruff: noqa: SLF001

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from nats.aio.client import DEFAULT_BUFFER_SIZE, PING_PROTO, Client
from nats.aio.transport import TcpTransport
from nats.errors import Error, StaleConnectionError
from nats.protocol.parser import AWAITING_CONTROL_LINE

from antiphon.bus.dispatch import dispatch_sync
from antiphon.bus.thread_safe_writer import ThreadSafeWriter
from antiphon.bus.transport import Packet

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from ssl import SSLContext
    from urllib.parse import ParseResult

    from nats.aio.client import Srv
    from nats.aio.subscription import Subscription

    from antiphon.bus.transport import PacketCallback

FLUSH_TIMEOUT_S = 2
LEAVE_TIMEOUT_S = 1.0
DEFAULT_PORT = 4222


_MESSAGE = b"MSG "
_LINE_END = b"\r\n"
_NO_RESPONDERS = b"NATS/1.0 503"


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
        self._unread: bytearray = reader._buffer  # pyright: ignore[reportAttributeAccessIssue]
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


class Socket(TcpTransport):
    """A TCP connection that passes received bytes to `consume` first and closes immediately.

    `StreamWriter.close` flushes its buffer first, so that reconnecting from a frozen or half-open
    broker would wait for that broker. Unencrypted data is written by `ThreadSafeWriter`.
    """

    def __init__(self, consume: Callable[[bytes], bytes]) -> None:
        super().__init__()
        self._consume = consume
        self._outgoing: ThreadSafeWriter | None = None
        self._encrypted = False

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        """Connect as nats-py does, with `FrameReader` as the protocol."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(buffer_size, loop)
        protocol = FrameReader(reader, self._consume, self._stop_writing)
        async with asyncio.timeout(connect_timeout):
            transport, _ = await loop.create_connection(
                lambda: protocol, uri.hostname or "", uri.port or DEFAULT_PORT
            )
        self._bare_io_reader = self._io_reader = reader
        self._bare_io_writer = self._io_writer = asyncio.StreamWriter(
            transport, protocol, reader, loop
        )
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
        self._stop_writing()
        await super().connect_tls(uri, ssl_context, buffer_size, connect_timeout)
        self._encrypted = True

    def write(self, payload: bytes) -> None:
        """Write bytes of nats-py."""
        if self._encrypted:
            super().write(payload)
        elif self._outgoing is not None:
            self._outgoing.write(payload)

    def writelines(self, payload: list[bytes]) -> None:
        """Write several chunks of nats-py."""
        self.write(b"".join(payload))

    def close(self) -> None:
        """Close without writing buffered data; flush first to keep it."""
        self._stop_writing()
        if self._io_writer is not None:
            self._io_writer.transport.abort()

    @property
    def writer(self) -> asyncio.WriteTransport | ThreadSafeWriter | None:
        """The open transport, if any. A `ThreadSafeWriter` may be used from any thread."""
        if not self._encrypted:
            return self._outgoing
        if self._io_writer is None or self._io_writer.transport.is_closing():
            return None
        return self._io_writer.transport

    def _stop_writing(self) -> None:
        outgoing, self._outgoing = self._outgoing, None
        if outgoing is not None:
            outgoing.close()


class Connection(Client):
    """A client that reconnects after every error, and then publishes no older messages."""

    def __init__(self) -> None:
        super().__init__()
        self._receivers: dict[int, PacketCallback] = {}  # plain functions, by subscription id

    def send(
        self,
        writer: asyncio.WriteTransport | ThreadSafeWriter,
        subject: str,
        data: bytes,
        reply: str | None,
        headers: Mapping[str, str] | None,
    ) -> None:
        """Publish to `writer`, the current one of this connection. The caller checks sizes.

        Subjects and headers are not validated: subjects come from routes and buckets, which escape
        every name, or from the broker, and headers are our own.

        `Client.publish` is four coroutines, checks each subject with two regular expressions, and
        wakes a task that writes. With a `ThreadSafeWriter` any thread may call this.
        """
        reply_field = f"{reply} " if reply else ""
        if headers is None:
            line = f"PUB {subject} {reply_field}{len(data)}\r\n"
        else:
            lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            head = f"NATS/1.0\r\n{lines}\r\n"
            head_bytes = len(head.encode())
            line = f"HPUB {subject} {reply_field}{head_bytes} {head_bytes + len(data)}\r\n{head}"
        writer.write(b"%b%b\r\n" % (line.encode(), data))

    async def subscribe_callback(
        self, subject: str, receive: PacketCallback, queue: str | None
    ) -> Subscription:
        """Subscribe with a plain function, called in the same event loop iteration as the read."""
        subscription = await self.subscribe(subject, queue=queue or "")
        self._receivers[subscription._id] = receive
        return subscription

    def discard_pending(self) -> None:
        """Drop unwritten commands, and fail the flushes that wait for a pong.

        nats-py keeps both over a reconnect even with `pending_size=0`: it publishes the commands to
        the next broker, and lets the flushes time out.
        """
        self._pending = []
        self._pending_data_size = 0
        for pong in self._pongs:
            if not pong.done():
                pong.set_exception(StaleConnectionError())
                pong.exception()  # Mark as retrieved: no task awaits the pong of a keep-alive.

    async def drain_subscription(self, subscription: Subscription) -> None:
        """End a subscription and return when all messages that had arrived are processed.

        `Subscription.drain` fails if the link drops meanwhile, and leaves a subscription that is
        renewed at the next reconnect and never read.
        """
        sid = subscription._id
        await self._send_unsubscribe(sid)
        try:
            if self.is_connected:
                await self.flush(FLUSH_TIMEOUT_S)
            self._remove_sub(sid)
        except (Error, OSError):
            self._remove_sub(sid)
            # A reconnect in between has renewed the subscription.
            await self._send_unsubscribe(sid)
        await subscription._pending_queue.join()
        subscription._stop_processing()
        self._receivers.pop(sid, None)

    async def _connect_to_server(self, s: Srv) -> None:
        """Connect, after cleaning up an attempt that failed once it was connected.

        nats-py reconnects its transport while the tasks of that attempt still run. Their reader
        moves to the new socket when the old one ends, and two readers break each other: the client
        receives nothing any more, without an error. And if the attempt had parsed half a message,
        the new connection's first bytes would be parsed as its other half.
        """
        await self._close_failed_attempt()
        if s.uri.scheme in ("nats", "tls"):
            socket = Socket(self._consume_messages)
            await socket.connect(s.uri, DEFAULT_BUFFER_SIZE, self.options["connect_timeout"])
            self._transport = socket
        else:
            await super()._connect_to_server(s)

    async def _close_failed_attempt(self) -> None:
        tasks: tuple[asyncio.Task[None] | None, ...] = (
            self._reading_task,
            self._ping_interval_task,
            self._flusher_task,
        )
        running: list[asyncio.Task[None]] = [task for task in tasks if task and not task.done()]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=LEAVE_TIMEOUT_S)
        if self._transport is not None:
            self._transport.close()
            self._transport = None
        self._ps.reset()

    async def _process_err(self, err_msg: str) -> None:
        """Reconnect after any error but a permissions violation, which needs no reconnect.

        nats-py closes for good, even on errors that a new connection would not have.
        """
        if "permissions violation" in err_msg:
            await super()._process_err(err_msg)
        else:
            await self._error_cb(Error(f"nats: {err_msg}"))
            await self._process_op_err(StaleConnectionError())

    async def _flush_pending(self, force_flush: bool = False) -> None:
        """Write pending commands at once; nats-py wakes a task, which waits for a slow broker.

        Without a connection they stay for the next one, unless `discard_pending` drops them.
        """
        writer = self.writer
        if writer is not None:
            self._write_pending(writer)
        elif not isinstance(self._transport, Socket):
            await super()._flush_pending(force_flush)

    @property
    def writer(self) -> asyncio.WriteTransport | ThreadSafeWriter | None:
        """The transport to write to; None while there is no connection."""
        socket = self._transport
        return socket.writer if isinstance(socket, Socket) and self.is_connected else None

    def _write_pending(self, writer: asyncio.WriteTransport | ThreadSafeWriter) -> None:
        if self._pending:
            writer.write(b"".join(self._pending))
            self._pending = []
            self._pending_data_size = 0

    def _consume_messages(self, data: bytes) -> bytes:
        """Dispatch the complete messages at the start of a read; return the remaining bytes.

        nats-py would wake one task for the read and another for each message, and parse both with
        regular expressions: half of the cost of a small message. The remaining bytes still take
        that path, as do later ones until nats-py has parsed them all: a payload whose header line
        it has parsed must not be inspected here, since it may look like a protocol line.
        """
        at = 0
        while self._between_messages and data.startswith(_MESSAGE, at):
            line_end = data.find(_LINE_END, at)
            words = data[at + len(_MESSAGE) : max(line_end, 0)].split(b" ")
            if line_end < 0 or len(words) not in {3, 4} or not (words[1] + words[-1]).isdigit():
                break
            begin = line_end + len(_LINE_END)
            end = begin + int(words[-1])
            receive = self._receivers.get(int(words[1]))
            if receive is None or end + len(_LINE_END) > len(data):
                break
            reply = _text(words[2]) if len(words) == 4 else None
            dispatch_sync(receive, Packet(_text(words[0]), data[begin:end], reply))
            at = end + len(_LINE_END)
        return data[at:]

    @property
    def _between_messages(self) -> bool:
        """Whether nats-py has no partial message."""
        parser = self._ps
        return self.is_connected and parser.state == AWAITING_CONTROL_LINE and not parser.buf

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes
    ) -> None:
        """Dispatch a message that nats-py has parsed, if its receiver is a plain function."""
        receive = self._receivers.get(sid)
        if receive is None:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        no_responders = bool(headers) and not data and headers.startswith(_NO_RESPONDERS)
        dispatch_sync(receive, Packet(_text(subject), data, _text(reply) or None, no_responders))

    async def _send_ping(self, future: asyncio.Future[bool] | None = None) -> None:
        """Send a ping after everything published before.

        nats-py's ping overtakes data that its flusher has not written yet, so that `flush` returns
        before the broker has read the last messages and subscriptions.
        """
        self._pongs.append(asyncio.Future() if future is None else future)
        await self._send_command(PING_PROTO)
        await self._flush_pending()

    async def _process_pong(self) -> None:
        """Skip a pong whose flush has timed out; nats-py's read loop would end on it."""
        if self._pongs and self._pongs[0].done():
            self._pongs.pop(0)
            self._pings_outstanding = 0
        else:
            await super()._process_pong()


def _text(subject: bytes) -> str:
    """Decode a subject. Publishers to a wildcard subject may use arbitrary bytes in it."""
    return subject.decode(errors="replace")
