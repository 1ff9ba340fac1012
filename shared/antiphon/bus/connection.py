"""The nats-py client, with fixes for services that run for months.

This file alone uses its private members. Comments say what nats-py 2.16 would do without it.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# ruff: noqa: SLF001

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from nats.aio.client import DEFAULT_BUFFER_SIZE, PING_PROTO, Client, Srv
from nats.errors import Error, StaleConnectionError
from nats.protocol.parser import AWAITING_CONTROL_LINE

from antiphon.bus.tcp import Socket, ThreadSafeWriter, dispatch_messages, text
from antiphon.bus.transport import Packet, PacketCallback, dispatch_sync

if TYPE_CHECKING:
    from nats.aio.subscription import Subscription


FLUSH_TIMEOUT_S = 2
LEAVE_TIMEOUT_S = 1.0
_NO_RESPONDERS = b"NATS/1.0 503"


class Connection(Client):
    """A client that reconnects after every error, and then publishes no older messages."""

    def __init__(self) -> None:
        super().__init__()
        self._receivers: dict[int, PacketCallback] = {}  # plain functions, by subscription id

    @property
    def writer(self) -> asyncio.WriteTransport | ThreadSafeWriter | None:
        """The transport to write to; None while there is no connection."""
        socket = self._transport
        return socket.writer if isinstance(socket, Socket) and self.is_connected else None

    async def subscribe_callback(
        self, subject: str, receive: PacketCallback, queue: str | None
    ) -> Subscription:
        """Subscribe with a plain function, called in the same event loop iteration as the read."""
        subscription = await self.subscribe(subject, queue=queue or "")
        self._receivers[subscription._id] = receive
        return subscription

    def discard_pending(self) -> None:
        """Drop unwritten commands, and fail the flushes that wait for a pong."""
        # Even with pending_size=0, it would publish the commands to the next broker.
        self._pending, self._pending_data_size = [], 0
        for pong in self._pongs:
            if not pong.done():
                pong.set_exception(StaleConnectionError())
                pong.exception()  # retrieved: no task awaits the pong of a keep-alive

    async def drain_subscription(self, subscription: Subscription) -> None:
        """End a subscription and return when all messages that had arrived are processed."""
        # `Subscription.drain` fails if the link drops meanwhile, and leaves a subscription that is
        # renewed at the next reconnect and never read.
        sid = subscription._id
        await self._send_unsubscribe(sid)
        try:
            if self.is_connected:
                await self.flush(FLUSH_TIMEOUT_S)
            self._remove_sub(sid)
        except (Error, OSError):
            self._remove_sub(sid)
            await self._send_unsubscribe(sid)  # a reconnect in between has renewed it
        await subscription._pending_queue.join()
        subscription._stop_processing()
        self._receivers.pop(sid, None)

    async def _connect_to_server(self, s: Srv) -> None:
        await self._close_failed_attempt()
        if s.uri.scheme in ("nats", "tls"):
            socket = Socket(self._consume_messages)
            await socket.connect(s.uri, DEFAULT_BUFFER_SIZE, self.options["connect_timeout"])
            self._transport = socket
        else:
            await super()._connect_to_server(s)

    async def _close_failed_attempt(self) -> None:
        # The tasks of a failed attempt would still run. Their reader would move to the new socket,
        # and two readers break each other, without an error. And if it had parsed half a message,
        # the new connection's first bytes would be parsed as the other half.
        tasks = (self._reading_task, self._ping_interval_task, self._flusher_task)
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
        # It would close for good, even on errors that a new connection would not have.
        if "permissions violation" in err_msg:
            await super()._process_err(err_msg)
        else:
            await self._error_cb(Error(f"nats: {err_msg}"))
            await self._process_op_err(StaleConnectionError())

    async def _flush_pending(self, force_flush: bool = False) -> None:
        # It would wake a task, which waits for a slow broker.
        if (writer := self.writer) is not None:
            if self._pending:
                writer.write(b"".join(self._pending))
                self._pending, self._pending_data_size = [], 0
        elif not isinstance(self._transport, Socket):
            await super()._flush_pending(force_flush)

    def _consume_messages(self, data: bytes) -> bytes:
        # It would wake a task for the read and one a message: half of a small message's cost.
        return dispatch_messages(data, self._receivers, self._between_messages)

    def _between_messages(self) -> bool:
        # A payload whose header line it has parsed may look like a protocol line.
        parser = self._ps
        return self.is_connected and parser.state == AWAITING_CONTROL_LINE and not parser.buf

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes
    ) -> None:
        if (receive := self._receivers.get(sid)) is None:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        no_responders = bool(headers) and not data and headers.startswith(_NO_RESPONDERS)
        dispatch_sync(receive, Packet(text(subject), data, text(reply) or None, no_responders))

    async def _send_ping(self, future: asyncio.Future[bool] | None = None) -> None:
        # Its ping would overtake data that its flusher has not written yet.
        self._pongs.append(asyncio.Future() if future is None else future)
        await self._send_command(PING_PROTO)
        await self._flush_pending()

    async def _process_pong(self) -> None:
        # Its read loop would end on a pong whose flush has timed out.
        if self._pongs and self._pongs[0].done():
            self._pongs.pop(0)
            self._pings_outstanding = 0
        else:
            await super()._process_pong()
