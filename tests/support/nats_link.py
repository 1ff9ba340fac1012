"""A proxy between clients and a broker that reads their protocol.

It can cut and hold connections, and lose, repeat, delay and reorder messages by their subject.
"""

from __future__ import annotations

import asyncio
import random
import urllib.parse
from collections import deque
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from antiphon.wire.routes import escape

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

_CONNECT = b"CONNECT "
_PAYLOADS = (b"MSG ", b"HMSG ", b"PUB ", b"HPUB ")
_END = b"\r\n"


@dataclass(frozen=True, slots=True)
class LinkMessage:
    """One message on its way through a link.

    Attributes:
        client: The name that its client gave in CONNECT.
        sent: Whether the client has published it; else it is delivered to that client.
        payload: With its headers, if it has any.
    """

    client: str
    sent: bool
    subject: str
    reply: str
    payload: bytes


class Action(StrEnum):
    """What a link does with a message."""

    PASS = "pass"
    DROP = "drop"
    DUPLICATE = "duplicate"
    DELAY = "delay"
    """It comes later, as does what follows it in its subject, as in NATS."""
    REORDER = "reorder"
    """It comes later, and what follows it in its subject overtakes it."""
    KEEP = "keep"
    """It comes when the link releases what it keeps, and what follows it overtakes it."""
    LAST = "last"
    """It passes, and nothing after it on this connection in this direction."""
    NONE_MORE = "none more"
    """Neither this nor anything after it on this connection in this direction passes."""


def ignores(_: LinkMessage) -> None:
    """The watch of a link that nothing watches."""


def passes(_: LinkMessage) -> Action:
    """The rule of a link without faults."""
    return Action.PASS


@dataclass
class Connection:
    """One client's connection, and the link's own to the broker on its behalf."""

    client: asyncio.StreamWriter
    broker: asyncio.StreamWriter
    name: str = ""
    open: bool = True
    ended: set[bool] = field(default_factory=set[bool])
    """Directions in which nothing passes any more: whether it was sent."""
    late: dict[tuple[bool, str], deque[bytes]] = field(
        default_factory=dict[tuple[bool, str], "deque[bytes]"]
    )

    def cut(self) -> None:
        self.open = False
        self.client.transport.abort()
        self.broker.transport.abort()


class NatsLink:
    """Relays the connections of clients to a broker.

    Attributes:
        url: Where clients connect.
        up: Whether connections are accepted.
        rule: What is done with each message. It is called before anything is passed on, and may cut
            connections and kill processes.
        watch: Is called with each message, whatever is done with it.
        late_s: How long delayed and reordered messages take.
        acted: How many messages a rule or a hold has acted on.
    """

    def __init__(self, nats_url: str, late_s: float = 0.05) -> None:
        self.url = ""
        self.up = True
        self.rule: Callable[[LinkMessage], Action] = passes
        self.watch: Callable[[LinkMessage], None] = ignores
        self.late_s = late_s
        self.acted = 0
        self._broker = urllib.parse.urlsplit(nats_url)
        self._connections: list[Connection] = []
        self._held: set[tuple[str, bool]] = set()
        self._kept: list[tuple[asyncio.StreamWriter, bytes]] = []
        self._changed = asyncio.Event()

    def cut(self, client: str | None = None) -> None:
        """Close connections: those of one client, or all, and then accept none until `up` is set.

        Nothing that was read of them before is passed on.
        """
        self.up = self.up and client is not None
        for connection in self._connections:
            if client in (None, connection.name):
                connection.cut()
        self._wake()

    def hold(self, client: str, *, sent: bool) -> None:
        """Pass nothing on that a client sends, or that it is sent, until it is let go.

        Nothing is lost, as in a network that is broken in one direction: it comes when that is
        mended. A client that has connected again by then has two connections at the broker.
        """
        self._held.add((client, sent))

    def let_go(self) -> None:
        """Hold nothing any more."""
        self._held.clear()
        self._wake()

    def release(self) -> None:
        """Pass on the messages that are kept."""
        for writer, frame in self._kept:
            _write_if_open(writer, frame)
        self._kept.clear()

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.up:
            writer.close()
            return
        try:
            there, broker = await asyncio.open_connection(self._broker.hostname, self._broker.port)
        except OSError:  # the broker is down
            writer.close()
            return
        connection = Connection(writer, broker)
        self._connections.append(connection)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._pass_on(connection, reader, broker, sent=True))
            group.create_task(self._pass_on(connection, there, writer, sent=False))
        self._connections.remove(connection)

    async def _pass_on(
        self,
        connection: Connection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        sent: bool,
    ) -> None:
        try:
            while line := await reader.readline():
                frame, message = line, None
                if line.startswith(_PAYLOADS):
                    payload = await reader.readexactly(int(line.split()[-1]) + len(_END))
                    frame = line + payload
                    message = _message(connection.name, line, payload[: -len(_END)], sent=sent)
                elif sent and line.startswith(_CONNECT):
                    connection.name = msgspec.json.decode(line[len(_CONNECT) :]).get("name") or ""
                while connection.open and (connection.name, sent) in self._held:
                    self.acted += 1
                    await self._changed.wait()
                if connection.open and sent not in connection.ended:
                    self._write(connection, writer, frame, message)
                if not connection.open:  # cut meanwhile, by the rule perhaps
                    break
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        writer.close()

    def _write(
        self,
        connection: Connection,
        writer: asyncio.StreamWriter,
        frame: bytes,
        message: LinkMessage | None,
    ) -> None:
        if message is None:
            writer.write(frame)
            return
        self.watch(message)
        action = self.rule(message)
        self.acted += action is not Action.PASS
        if action in (Action.LAST, Action.NONE_MORE):
            connection.ended.add(message.sent)
        if action in (Action.DROP, Action.NONE_MORE) or not connection.open:
            return
        if action is Action.KEEP:
            self._kept.append((writer, frame))
            return
        where = (message.sent, message.subject)
        loop = asyncio.get_running_loop()
        if (held := connection.late.get(where)) is not None and action is not Action.REORDER:
            held.extend([frame] * (2 if action is Action.DUPLICATE else 1))
        elif action is Action.DELAY:
            connection.late[where] = deque([frame])
            loop.call_later(self.late_s, self._release, connection, writer, where)
        elif action is Action.REORDER:
            loop.call_later(self.late_s, _write_if_open, writer, frame)
        else:
            writer.write(frame * (2 if action is Action.DUPLICATE else 1))

    def _release(
        self, connection: Connection, writer: asyncio.StreamWriter, where: tuple[bool, str]
    ) -> None:
        for frame in connection.late.pop(where):
            _write_if_open(writer, frame)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _write_if_open(writer: asyncio.StreamWriter, frame: bytes) -> None:
    if not writer.is_closing():
        writer.write(frame)


def _message(client: str, line: bytes, payload: bytes, *, sent: bool) -> LinkMessage:
    verb, subject, *words = line.decode(errors="replace").split()
    # Between the subject and the sizes: to the client a subscription id, then a reply, if any.
    between = words[: -2 if verb.startswith("H") else -1][0 if sent else 1 :]
    return LinkMessage(client, sent, subject, between[0] if between else "", payload)


class Share:
    """A rule: an action for a seeded share of the messages that clients are sent."""

    def __init__(self, action: Action, share: float, seed: int = 0) -> None:
        self.action = action
        self._share = share
        self._random = random.Random(seed)  # a schedule, not a secret

    def __call__(self, message: LinkMessage) -> Action:
        hit = not message.sent and self._random.random() < self._share
        return self.action if hit else Action.PASS


class Apart:
    """A rule: two clients do not reach each other, and both reach the broker and all others.

    The sender of a message is known by its subject, or by who publishes it to a subject of the
    other one: its inbox, too.
    """

    def __init__(self, one: str, other: str) -> None:
        self._other = {one: escape(other), other: escape(one)}

    def __call__(self, message: LinkMessage) -> Action:
        other = self._other.get(message.client)
        words = message.subject.split(".")
        # The supervisor, and not the process of this name, says that it has ended.
        reaches = other in words and words[-1] != "exit"
        return Action.DROP if reaches else Action.PASS


@asynccontextmanager
async def linked(nats_url: str) -> AsyncGenerator[NatsLink]:
    """A link to a broker."""
    link = NatsLink(nats_url)
    server = await asyncio.start_server(link.relay, "127.0.0.1", 0)
    link.url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield link
    finally:
        server.close()
        link.let_go()
        link.cut()
