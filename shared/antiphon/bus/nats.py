"""The transport over NATS: callbacks only, and no buffering during an outage."""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import nats.errors

from antiphon.bus.connection import Connection
from antiphon.bus.tcp import ThreadSafeWriter, publish_frame
from antiphon.bus.transport import BusDown, LinkState, Packet, PacketCallback, dispatch, is_async
from antiphon.wire.errors import RequestTooLarge

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nats.aio.client import Server
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

    from antiphon.config.settings import BusConfig

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
LEAVE_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 1.0
SUBSCRIBE_TIMEOUT_S = 2.0
CANCEL_AGAIN_S = 0.05
PENDING_MESSAGES_MAX = 64 * 1024
"""Maximum messages queued for one receiver; more are dropped and counted."""
PENDING_BYTES_MAX = 64 * 1024 * 1024
OUTBOUND_BYTES_MAX = 8 * 1024 * 1024
"""Maximum bytes not yet written to the socket: a broker that stops reading counts as down."""


@dataclass(slots=True)
class LinkErrors:
    dropped: int = 0  # messages of a slow receiver
    forbidden: int = 0  # publishes and subscriptions rejected by the broker's permissions
    failed: int = 0  # all others, including failed attempts to connect


class NatsTransport:
    """One connection to NATS. Implements `Transport`."""

    def __init__(
        self, config: BusConfig, *, name: str, connect_timeout_s: float = CONNECT_TIMEOUT_S
    ) -> None:
        self.errors = LinkErrors()
        self._config = config
        self._name = name
        self._connect_timeout_s = connect_timeout_s
        self.link = LinkState()
        self._connection = Connection()
        self._subscriptions: set[NatsSubscription] = set()
        self.payload_bytes_max = config.payload_bytes_max
        self._reasons: dict[str, None] = {}  # Why first attempts to connect failed.

    @property
    def any_thread(self) -> bool:
        """Whether `publish` may be called from any thread now: not over TLS or while down."""
        return isinstance(self._connection.writer, ThreadSafeWriter)

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as failing:
            failing.push_async_callback(self._close)
            await self._connect()
            await self._on_connected()
            failing.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT_S), asyncio.TaskGroup() as group:
                for subscription in tuple(self._subscriptions):
                    group.create_task(subscription.drain())
            if self.link.up:
                await self.flush(CLOSE_TIMEOUT_S)
        except (TimeoutError, BusDown):
            log.warning("bus left before it was drained", extra={"bus": self._name})
        finally:
            self.link.mark_disconnected()
            await self._close()

    def publish(
        self,
        subject: str,
        data: bytes,
        reply: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if len(data) > self.payload_bytes_max:
            raise RequestTooLarge.of(size_bytes=len(data), bytes_max=self.payload_bytes_max)
        writer = self._connection.writer
        if not self.link.up or writer is None:
            raise BusDown("the NATS connection is down", retry_after_s=1.0)
        if writer.get_write_buffer_size() > OUTBOUND_BYTES_MAX:
            raise BusDown("the NATS server does not read", retry_after_s=1.0)
        # `Client.publish` is four coroutines, checks each subject with two regular expressions, and
        # wakes a task that writes.
        writer.write(publish_frame(subject, data, reply, headers))

    async def subscribe(
        self, subject: str, receive: PacketCallback, queue: str | None = None
    ) -> NatsSubscription:
        if is_async(receive):
            inner = await self._subscribe_queued(subject, receive, queue)
        else:
            inner = await self._connection.subscribe_callback(subject, receive, queue)
        subscription = NatsSubscription(self._connection, inner, self._subscriptions.discard)
        self._subscriptions.add(subscription)
        if self.link.up:
            try:
                await self.flush(SUBSCRIBE_TIMEOUT_S)
            except BusDown:
                log.info("subscription waits for the broker", extra={"subject": subject})
        return subscription

    async def flush(self, timeout_s: float) -> None:
        connect_count = self.link.connect_count
        try:
            async with asyncio.timeout(timeout_s):
                await self._connection.flush()
        except (TimeoutError, nats.errors.Error, OSError) as error:
            raise BusDown("the NATS server has not read all messages", retry_after_s=1.0) from error
        reconnected = self.link.connect_count != connect_count
        if not (self.link.up and self._connection.is_connected) or reconnected:
            raise BusDown("the NATS connection was lost", retry_after_s=1.0)

    async def _subscribe_queued(
        self, subject: str, receive: PacketCallback, queue: str | None
    ) -> Subscription:
        async def callback(message: Msg) -> None:
            # An empty one with status 503 is the broker's reply that there are no responders.
            status = message.headers.get("Status") if message.headers else None
            no_responders = not message.data and status == "503"
            reply = message.reply or None
            await dispatch(receive, Packet(message.subject, message.data, reply, no_responders))

        return await self._connection.subscribe(  # pyright: ignore[reportUnknownMemberType]
            subject,
            queue=queue or "",
            cb=callback,
            pending_msgs_limit=PENDING_MESSAGES_MAX,
            pending_bytes_limit=PENDING_BYTES_MAX,
        )

    async def _connect(self) -> None:
        """Connect to the broker, or give up after the timeout."""
        # nats-py retries, and awaits each response with `asyncio.wait_for`, which can swallow a
        # cancellation in Python 3.11: https://github.com/python/cpython/issues/86296. So it is
        # cancelled repeatedly until it ends: with a wrong password one start in twenty hung
        # forever.
        connecting = self._connection.connect(**self._options())
        trying = asyncio.create_task(connecting, name="connect")  # noqa: TID251  # awaited below
        try:
            await asyncio.wait([trying], timeout=self._connect_timeout_s)
        finally:
            while not trying.done():
                trying.cancel()
                await asyncio.wait([trying], timeout=CANCEL_AGAIN_S)
        if trying.cancelled():
            raise BusDown(
                f"no NATS server at {self._config.url} in {self._connect_timeout_s:g} s: "
                f"{', '.join(self._reasons) or 'no answer'}",
                retry_after_s=1.0,
            )
        await trying

    def _options(self) -> dict[str, Any]:
        config = self._config
        return {
            "servers": [url.strip() for url in config.url.split(",")],
            "name": self._name,
            "user": config.user or None,
            "password": config.password or None,
            "connect_timeout": config.connect_timeout_s,
            "ping_interval": config.ping_interval_s,
            "max_outstanding_pings": 2,
            "max_reconnect_attempts": -1,
            "reconnect_time_wait": config.reconnect_wait_s,
            "reconnect_to_server_handler": self._choose_server,
            "pending_size": 0,
            "error_cb": self._on_error,
            "disconnected_cb": self._on_disconnected,
            "reconnected_cb": self._on_connected,
        }

    def _choose_server(
        self, servers: list[Server], _info: dict[str, object]
    ) -> tuple[Server, float]:
        pick = min(servers, key=lambda server: (server.reconnects, random.random()))  # noqa: S311  # spreads load
        return pick, self._config.reconnect_wait_s * random.uniform(0.5, 1.5)  # noqa: S311

    async def _on_connected(self) -> None:
        self.payload_bytes_max = min(self._config.payload_bytes_max, self._connection.max_payload)
        log.info("bus joined", extra={"bus": self._name, "joins": self.link.connect_count + 1})
        await self.link.mark_connected()

    async def _on_disconnected(self) -> None:
        self._connection.discard_pending()
        if self.link.up:
            log.warning("bus link dropped", extra={"bus": self._name})
        self.link.mark_disconnected()

    async def _on_error(self, error: Exception) -> None:
        """Count background errors of nats-py; repeats are logged when the count doubles."""
        text = str(error) or type(error).__name__
        if not self.link.connect_count:
            self._reasons[text] = None
        if isinstance(error, nats.errors.SlowConsumerError):
            self.errors.dropped += 1
            if _doubled(self.errors.dropped):
                log.warning(
                    "slow receiver lost messages",
                    extra={"subject": error.subject, "dropped": self.errors.dropped},
                )
        elif "permissions violation" in text:
            self.errors.forbidden += 1
            log.error("broker refused", extra={"error": text})
        else:
            self.errors.failed += 1
            if _doubled(self.errors.failed):
                log.warning("bus failed", extra={"error": text, "failed": self.errors.failed})

    async def _close(self) -> None:
        self._connection.discard_pending()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._connection.close()
        except TimeoutError:
            log.warning("bus did not close in time", extra={"bus": self._name})


class NatsSubscription:
    def __init__(
        self, connection: Connection, inner: Subscription, ended: Callable[[NatsSubscription], None]
    ) -> None:
        self._connection = connection
        self._inner = inner
        self._on_end = ended
        self._draining = asyncio.Lock()
        self._ended = False

    async def drain(self) -> None:
        async with self._draining:
            if not self._ended:
                self._ended = True
                await self._connection.drain_subscription(self._inner)
                self._on_end(self)


def _doubled(count: int) -> bool:
    return count & (count - 1) == 0
