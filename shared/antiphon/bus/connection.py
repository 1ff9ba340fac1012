"""The nats-py client, with the corners rounded on which a service that lives for months falls.

Each override says what nats-py 2.16 does by itself. Only `antiphon.bus.nats` uses this.
"""

# What is wrong sits in nats-py's protected members, which are partly untyped.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# ruff: noqa: SLF001

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from nats.aio.client import DEFAULT_BUFFER_SIZE, PING_PROTO, Client
from nats.aio.transport import TcpTransport
from nats.errors import Error, StaleConnectionError

if TYPE_CHECKING:
    from nats.aio.client import Srv
    from nats.aio.subscription import Subscription

FLUSH_TIMEOUT_S = 2


class Socket(TcpTransport):
    """A TCP connection that closes at once.

    `StreamWriter.close` first writes what is buffered, so that reconnecting from a frozen or
    half-open broker would wait for the very peer that was given up.
    """

    def close(self) -> None:
        """Close without writing what is buffered. Whoever wants it written flushes before."""
        if self._io_writer is not None:
            self._io_writer.transport.abort()

    @property
    def open(self) -> bool:
        """Whether it may be written to."""
        return self._io_writer is not None and not self._io_writer.transport.is_closing()

    @property
    def idle(self) -> bool:
        """Whether it is open and has passed on all that was written."""
        writer = self._io_writer
        return writer is not None and self.open and not writer.transport.get_write_buffer_size()


class Connection(Client):
    """A client that reconnects after every error, and publishes nothing of the time before."""

    _write_due = False
    """Whether what is pending is written at the end of this turn of the event loop."""

    def forget(self) -> None:
        """Drop the commands that were not written yet, and fail the flushes that wait for a pong.

        nats-py keeps both over a reconnect even with `pending_size=0`: it publishes the commands to
        whatever broker comes next, and lets the flushes run into their timeout.
        """
        self._pending = []
        self._pending_data_size = 0
        for pong in self._pongs:
            if not pong.done():
                pong.set_exception(StaleConnectionError())
                pong.exception()  # Seen: nobody waits for the pong of a keep-alive.

    async def end(self, subscription: Subscription) -> None:
        """End a subscription and return when what had arrived was received.

        `Subscription.drain` fails if the link drops meanwhile, and leaves a subscription that is
        made again at the next join and received by nobody.
        """
        sid = subscription._id
        await self._send_unsubscribe(sid)
        try:
            if self.is_connected:
                await self.flush(FLUSH_TIMEOUT_S)
            self._remove_sub(sid)
        except (Error, OSError):
            self._remove_sub(sid)
            # A join in between has subscribed again.
            await self._send_unsubscribe(sid)
        await subscription._pending_queue.join()
        subscription._stop_processing()

    async def _connect_to_server(self, s: Srv) -> None:
        if self._transport is None and s.uri.scheme in ("nats", "tls"):
            socket = Socket()
            await socket.connect(s.uri, DEFAULT_BUFFER_SIZE, self.options["connect_timeout"])
            self._transport = socket
        else:
            await super()._connect_to_server(s)

    async def _process_err(self, err_msg: str) -> None:
        """Reconnect after any error but a permission violation, which ends nothing.

        nats-py closes for ever, also for what the next connection does not suffer from.
        """
        if "permissions violation" in err_msg:
            await super()._process_err(err_msg)
        else:
            await self._error_cb(Error(f"nats: {err_msg}"))
            await self._process_op_err(StaleConnectionError())

    async def _flush_pending(self, force_flush: bool = False) -> None:
        """Write what is published in a turn of the event loop at its end, all at once.

        nats-py wakes a task for it each time, which costs as much as all else of a small message.
        It still does while the broker is slow to read, since it waits for it.
        """
        socket, flusher = self._transport, self._flusher_task
        idle = isinstance(socket, Socket) and socket.idle
        if force_flush or not idle or flusher is None or flusher.done():
            await super()._flush_pending(force_flush)
        elif not self._write_due:
            self._write_due = True
            asyncio.get_running_loop().call_soon(self._write)

    def _write(self) -> None:
        """Write what is pending; on a socket that has closed meanwhile it waits to be forgotten."""
        self._write_due = False
        socket = self._transport
        if self.is_connected and self._pending and isinstance(socket, Socket) and socket.open:
            socket.writelines(self._pending)
            self._pending = []
            self._pending_data_size = 0

    async def _send_ping(self, future: asyncio.Future[bool] | None = None) -> None:
        """Send a ping behind all that was published.

        nats-py's overtakes what its flusher has not written yet, so that `flush` returns before the
        broker has seen the last messages and subscriptions.
        """
        self._pongs.append(asyncio.Future() if future is None else future)
        await self._send_command(PING_PROTO)
        await self._flush_pending()

    async def _process_pong(self) -> None:
        """Skip a pong whose flush has given up; nats-py's read loop ends on it."""
        if self._pongs and self._pongs[0].done():
            self._pongs.pop(0)
            self._pings_outstanding = 0
        else:
            await super()._process_pong()
