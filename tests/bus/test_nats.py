"""What only the NATS transport can get wrong: frozen brokers, limits, refusals, reconnects."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

import pytest
import uvloop
from nats.aio.client import Client
from tests.bus.worlds import Mailbox, bus_config, flood, mailbox
from tests.support.nats import NatsServer
from tests.support.wait import until

from antiphon.bus import nats as transport_module
from antiphon.bus.connection import Connection
from antiphon.bus.nats import NatsTransport
from antiphon.bus.server import ServerSettings
from antiphon.bus.tcp import Socket
from antiphon.bus.transport import BusDown, Packet
from antiphon.service.tasks import Tasks
from antiphon.wire.errors import RequestTooLarge

if TYPE_CHECKING:
    from pathlib import Path

USERS = """
authorization {
  users: [{
    user: "one", password: "right"
    permissions: {publish: {allow: ["may"]}, subscribe: {allow: ["may"]}}
  }]
}
"""


async def test_commands_not_yet_written_are_not_published_to_the_next_broker(
    server: NatsServer, transport: NatsTransport
) -> None:
    box = await mailbox(transport, "news")
    await server.pause()
    chunk = b"x" * 512 * 1024
    wire = transport._connection.writer
    assert wire is not None
    async with asyncio.timeout(10):
        while wire.get_write_buffer_size() < len(chunk):
            transport.publish("news", chunk)
            await asyncio.sleep(0)
    await server.kill()
    await until(lambda: not transport.link.up)
    await server.start()
    await until(lambda: transport.link.up)
    transport.publish("news", b"after")
    assert await box.wait(1) == [b"after"]


def test_socket_that_closes_within_a_turn_is_not_written_to(server: NatsServer) -> None:
    """On the event loop of services, which raises there what others pass over."""

    async def publish_to_a_closed_socket() -> None:
        async with NatsTransport(bus_config(server.url), name="test") as transport:
            box = await mailbox(transport, "news")
            joins = transport.link.connect_count
            connection = transport._connection
            socket = connection._transport
            assert isinstance(socket, Socket)
            assert socket.writer is not None
            socket.close()
            await asyncio.sleep(0)
            assert connection.is_connected, "the broken link is not noticed yet"
            with pytest.raises(BusDown):
                transport.publish("news", b"before")
            await until(lambda: transport.link.connect_count > joins and transport.link.up)
            transport.publish("news", b"after")
            transport.publish("news", b"that")
            assert await box.wait(2) == [b"after", b"that"]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(publish_to_a_closed_socket())


async def test_publishing_to_a_frozen_broker_ends_in_an_error_not_in_memory(
    server: NatsServer, transport: NatsTransport
) -> None:
    await server.pause()
    with pytest.raises(BusDown, match="does not read"):
        await flood(transport)
    server.resume()


async def test_frozen_broker_is_found_by_pings_and_joined_again(server: NatsServer) -> None:
    config = bus_config(server.url, ping_interval_s=0.05)
    async with NatsTransport(config, name="test") as transport:
        box = await mailbox(transport, "news")
        # More than the sockets take: closing ours must not wait until that is written.
        await server.pause()
        with pytest.raises(BusDown):
            await flood(transport)
        await until(lambda: not transport.link.up)
        with pytest.raises(BusDown):
            transport.publish("news", b"lost")
        server.resume()
        await until(lambda: transport.link.up)
        box.packets.clear()
        transport.publish("news", b"after")
        assert (await box.wait(1))[-1] == b"after"


async def test_flush_timeout_keeps_the_link(server: NatsServer, transport: NatsTransport) -> None:
    box = await mailbox(transport, "news")
    await server.pause()
    with pytest.raises(BusDown):
        await transport.flush(0.05)
    server.resume()
    transport.publish("news", b"hello")
    assert await box.wait(1) == [b"hello"]
    await transport.flush(5)
    assert transport.link.connect_count == 1


async def test_any_error_of_the_server_is_followed_by_a_reconnect() -> None:
    settings = ServerSettings(name="shrinking", payload_bytes_max=64 * 1024)
    async with (
        NatsServer(settings) as server,
        NatsTransport(bus_config(server.url), name="test") as transport,
    ):
        box = await mailbox(transport, "news")
        assert transport.payload_bytes_max == 64 * 1024
        config = server.folder / "nats.conf"
        config.write_text(config.read_text().replace("max_payload: 65536", "max_payload: 1024"))
        server.running.process.send_signal(signal.SIGHUP)
        await reloaded(server.folder / "nats.log")
        # The server answers with -ERR 'Maximum Payload Violation' and closes.
        transport.publish("news", b"x" * 2048)
        await until(lambda: transport.link.connect_count == 2)
        with pytest.raises(RequestTooLarge):
            transport.publish("news", b"x" * 2048)
        transport.publish("news", b"after")
        assert await box.wait(1) == [b"after"]


class Doorkeeper:
    """Between clients and a broker.

    The second client gets INFO, one PONG, and then `last_words` and nothing more.
    """

    def __init__(self, broker_url: str, last_words: bytes) -> None:
        self._last_words = last_words
        self.visits: list[asyncio.StreamWriter] = []
        self._broker = urlsplit(broker_url)
        self._pumps = Tasks()

    async def __aenter__(self) -> Self:
        await self._pumps.__aenter__()
        self._server = await asyncio.start_server(self._visit, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        await self._pumps.cancel(1.0)
        await self._pumps.__aexit__(None, None, None)

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _visit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.visits.append(writer)
        lines_max = 2 if len(self.visits) == 2 else sys.maxsize
        inner, outer = await asyncio.open_connection(self._broker.hostname, self._broker.port)
        for pump in (self._pump(reader, outer, sys.maxsize), self._pump(inner, writer, lines_max)):
            self._pumps.create_task(pump)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, lines_max: int
    ) -> None:
        try:
            async for line in reader:
                if lines_max > 0:
                    writer.write(line)
                lines_max -= 1
                if lines_max == 0:
                    writer.write(self._last_words)
        except OSError:
            pass
        finally:
            writer.transport.abort()


@pytest.mark.parametrize(
    "last_words", [b"", b"MSG news 1 400000\r\nhalf a mes", b"MSG ne"], ids=["", "half", "line"]
)
async def test_attempt_to_rejoin_that_fails_late_leaves_nothing(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch, last_words: bytes
) -> None:
    monkeypatch.setattr(Client.flush, "__defaults__", (0.2,))  # its timeout, for a failure soon
    async with (
        Doorkeeper(server.url, last_words) as door,
        NatsTransport(bus_config(door.url), name="test") as transport,
    ):
        box = await mailbox(transport, "news")
        door.visits[0].transport.abort()
        await until(lambda: transport.link.connect_count == 2)
        assert len(door.visits) == 3, "the second attempt was to fail"
        door.visits[1].transport.abort()
        for data in (b"one", b"two", b"three"):
            transport.publish("news", data)
            await transport.flush(2)
        assert await box.wait(3) == [b"one", b"two", b"three"]


async def reloaded(log: Path) -> None:
    await until(lambda: "Reloaded server configuration" in log.read_text())


async def test_start_waits_for_a_broker_that_comes_up(server: NatsServer) -> None:
    await server.kill()
    async with asyncio.TaskGroup() as group:
        transport = NatsTransport(bus_config(server.url), name="test")
        entering = group.create_task(transport.__aenter__())
        await until(lambda: transport.errors.failed > 0)
        await server.start()
        await entering
    assert transport.link.up
    await transport.__aexit__()


async def test_start_without_a_broker_fails_in_time_naming_the_url(server: NatsServer) -> None:
    await server.kill()
    transport = NatsTransport(bus_config(server.url), name="test", connect_timeout_s=0.2)
    begun = time.monotonic()
    with pytest.raises(BusDown, match=server.url):
        await transport.__aenter__()
    assert time.monotonic() - begun < 2


async def test_wrong_password_is_named() -> None:
    async with NatsServer(ServerSettings(name="closed", users=USERS)) as server:
        config = bus_config(server.url, user="one", password="wrong")
        with pytest.raises(BusDown, match=r"(?i)authorization violation"):
            await NatsTransport(config, name="test", connect_timeout_s=2.0).__aenter__()


async def test_start_ends_despite_swallowed_cancellations(monkeypatch: pytest.MonkeyPatch) -> None:
    swallowed = 0

    async def connect(*_: object, **__: object) -> None:
        nonlocal swallowed
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if swallowed == 2:
                    raise
                swallowed += 1

    transport = NatsTransport(bus_config("nats://127.0.0.1:1"), name="test", connect_timeout_s=0.05)
    monkeypatch.setattr(transport._connection, "connect", connect)
    async with asyncio.timeout(10):
        with pytest.raises(BusDown, match="no answer"):
            await transport._connect()
    assert swallowed == 2


async def test_cancelled_start_leaves_no_connection_attempt(server: NatsServer) -> None:
    await server.kill()
    before = asyncio.all_tasks()
    async with asyncio.TaskGroup() as group:
        transport = NatsTransport(bus_config(server.url), name="test")
        start = group.create_task(transport.__aenter__())
        await until(lambda: len(asyncio.all_tasks()) > len(before) + 1)
        start.cancel()
    assert start.cancelled()
    assert asyncio.all_tasks() == before


async def test_refused_subjects_are_counted_on_a_live_link(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with NatsServer(ServerSettings(name="closed", users=USERS)) as server:
        config = bus_config(server.url, user="one", password="right")
        async with NatsTransport(config, name="test") as transport:
            box = await mailbox(transport, "may")
            foreign = await mailbox(transport, "may.not")
            transport.publish("may.not", b"no")
            transport.publish("may", b"yes")
            assert await box.wait(1) == [b"yes"]
            assert (transport.errors.forbidden, transport.link.connect_count) == (2, 1)
    assert "broker refused" in caplog.messages
    assert not foreign.packets


async def test_slow_receiver_loses_the_newest_and_is_counted(
    transport: NatsTransport, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transport_module, "PENDING_MESSAGES_MAX", 10)
    go, box = asyncio.Event(), Mailbox()

    async def receive(packet: Packet) -> None:
        await go.wait()
        await box.receive(packet)

    await transport.subscribe("fast", receive)
    for n in range(100):
        transport.publish("fast", b"%d" % n)
    await transport.flush(5)
    go.set()
    await until(lambda: len(box.packets) + transport.errors.dropped == 100)
    assert transport.errors.dropped >= 80
    # The first is taken from the ten that wait, at some time: that makes room for a later one.
    kept = [int(data) for data in box.data]
    assert kept[:10] == list(range(10))
    assert kept == sorted(set(kept))
    # Logged at each doubling: 1, 2, 4, ... 64.
    assert caplog.messages.count("slow receiver lost messages") == 7


async def test_leave_of_frozen_broker_ends(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport_module, "LEAVE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(transport_module, "CLOSE_TIMEOUT_S", 0.2)
    async with NatsTransport(bus_config(server.url), name="test") as transport:
        await transport.subscribe("news", Mailbox().receive)
        await server.pause()
        begun = time.monotonic()
    assert time.monotonic() - begun < 2
    server.resume()


async def test_drain_through_a_lost_link_ends_and_is_not_made_again(server: NatsServer) -> None:
    config = bus_config(server.url, ping_interval_s=0.05)
    async with NatsTransport(config, name="test") as transport:
        box = Mailbox()
        subscription = await transport.subscribe("news", box.receive)
        await server.pause()
        async with asyncio.TaskGroup() as group:
            group.create_task(subscription.drain())
            await until(lambda: not transport.link.up)
            server.resume()
            await until(lambda: transport.link.up)
        answers = await mailbox(transport, "answers")
        transport.publish("news", b"late", "answers")
        await answers.wait(1)
        assert answers.packets[0].no_responders
        assert not box.packets


async def test_another_server_of_the_list_is_taken(server: NatsServer) -> None:
    async with NatsServer() as other:
        urls = f"{server.url}, {other.url}"
        async with NatsTransport(bus_config(urls), name="test") as transport:
            first = transport._connection._server_info["server_name"]
            names = {s.settings.name: s for s in (server, other)}
            await names[first].kill()
            await until(lambda: transport.link.connect_count == 2)
            assert transport._connection._server_info["server_name"] != first


async def test_subject_that_is_not_utf8_is_received_and_breaks_nothing() -> None:
    async with NatsServer() as server, NatsTransport(bus_config(server.url), name="test") as here:
        received: list[Packet] = []
        await here.subscribe("odd.*", received.append)
        host, _, port = server.url.removeprefix("nats://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        await reader.readline()  # INFO
        writer.write(b'CONNECT {"verbose":false}\r\n')
        writer.write(b"PUB odd.\xff 2\r\nno\r\nPUB odd.y 3\r\nyes\r\n")
        await until(lambda: len(received) == 2)
        writer.close()
        assert [packet.data for packet in received] == [b"no", b"yes"]
        assert [packet.subject for packet in received] == ["odd.\N{REPLACEMENT CHARACTER}", "odd.y"]
        assert here.link.connect_count == 1


class Taken:
    """A connection that is up, with a plain receiver of subscription 7, and no socket."""

    def __init__(self) -> None:
        self.received: list[Packet] = []
        self.connection = Connection()
        self.connection._status = Connection.CONNECTED
        self.connection._receivers[7] = self.received.append

    def take(self, data: bytes) -> bytes:
        return self.connection._consume_messages(data)


def test_payload_that_looks_like_a_message_is_none() -> None:
    taken = Taken()
    forged = b"MSG other 7 4\r\nBAD!\r\n"
    asyncio.run(taken.connection._ps.parse(b"MSG a.b 7 %d\r\n" % len(forged)))
    assert taken.take(forged + b"\r\n") == forged + b"\r\n"
    assert taken.received == []
    asyncio.run(taken.connection._ps.parse(forged + b"\r\n"))
    assert taken.received == [Packet("a.b", forged, None)]
    assert taken.take(b"MSG a.b 7 2\r\nok\r\n") == b""
    assert taken.received[1:] == [Packet("a.b", b"ok", None)]


@pytest.mark.parametrize(
    "line", [b"MSG a 7", b"MSG a x 2", b"MSG a 7 two", b"MSG a b c 7 2", b"MSG a\x0bb 8 2 7"]
)
def test_line_that_is_none_of_the_protocol_is_left_to_nats_py(line: bytes) -> None:
    taken = Taken()
    data = line + b"\r\nhi\r\n"
    assert taken.take(data) == data
    assert taken.received == []


def test_messages_after_the_connection_is_closed_are_ignored() -> None:
    taken = Taken()
    taken.connection._status = Connection.RECONNECTING
    message = b"MSG a 7 2\r\nhi\r\n"
    assert taken.take(message) == message
    assert taken.received == []


async def test_thread_publishes_beside_the_event_loop_and_each_in_its_order(
    server: NatsServer, transport: NatsTransport
) -> None:
    count = 500
    assert transport.any_thread
    box = await mailbox(transport, "news")

    def publish() -> None:
        for number in range(count):
            transport.publish("news", b"thread %d" % number)

    thread = threading.Thread(target=publish)
    thread.start()
    for number in range(count):
        transport.publish("news", b"loop %d" % number)
        if number % 50 == 0:
            await asyncio.sleep(0)
    received = await box.wait(2 * count)
    thread.join()
    for writer in (b"thread", b"loop"):
        mine = [data for data in received if data.startswith(writer)]
        assert mine == [b"%b %d" % (writer, number) for number in range(count)]
    await server.kill()
    await until(lambda: not transport.link.up)
    assert not transport.any_thread
    with pytest.raises(BusDown):
        transport.publish("news", b"late")
