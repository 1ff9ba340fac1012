"""Three NATS servers in a cluster: one of them or all routes die, and no stream loses a word."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import urllib.error
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import pytest
from tests.system.stack import STOP_TIMEOUT_S, read, serving, wait_until
from tests.system.test_migration import DEADLINE_S, STREAMS, Reader

from antiphon.bus.server import find
from antiphon.supervisor.ports import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator
    from pathlib import Path

    from tests.system.stack import Stack

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

SERVERS = 3
HOST = "127.0.0.1"


@dataclass
class NatsCluster:
    """Real servers, which know each other by their routes.

    Attributes:
        relays: Where the others reach the route port of each, if not there.
    """

    folder: Path
    ports: list[int] = field(default_factory=list[int])
    monitoring: list[int] = field(default_factory=list[int])
    routes: list[int] = field(default_factory=list[int])
    relays: list[int] = field(default_factory=list[int])
    processes: dict[int, subprocess.Popen[bytes]] = field(
        default_factory=dict[int, "subprocess.Popen[bytes]"]
    )

    @property
    def url(self) -> str:
        return ",".join(f"nats://{HOST}:{port}" for port in self.ports)

    def start(self, number: int) -> None:
        reached = self.relays or self.routes
        with (self.folder / f"nats-{number}.log").open("ab") as log:
            self.processes[number] = subprocess.Popen(
                [
                    *(str(find()), "-n", f"nats-{number}", "-a", HOST),
                    *("-p", str(self.ports[number]), "-m", str(self.monitoring[number])),
                    *(
                        "--cluster_name",
                        "test",
                        "--cluster",
                        f"nats://{HOST}:{self.routes[number]}",
                    ),
                    *("--cluster_advertise", f"{HOST}:{reached[number]}"),
                    *("--routes", ",".join(f"nats://{HOST}:{port}" for port in reached)),
                ],
                stdout=log,
                stderr=log,
            )

    def is_whole(self) -> bool:
        """Whether each server has routes to all others."""
        try:
            return all(self.route_count(number) >= SERVERS - 1 for number in range(SERVERS))
        except (urllib.error.URLError, OSError):
            return False

    def route_count(self, number: int) -> int:
        return json.loads(read(f"http://{HOST}:{self.monitoring[number]}/varz"))["routes"]

    def connections(self, number: int) -> int:
        return json.loads(read(f"http://{HOST}:{self.monitoring[number]}/varz"))["connections"]

    def kill(self, number: int) -> None:
        os.kill(self.processes[number].pid, signal.SIGKILL)
        self.processes[number].wait(STOP_TIMEOUT_S)

    def choose_ports(self) -> None:
        taken: set[int] = set()
        for ports in (self.ports, self.monitoring, self.routes):
            while len(ports) < SERVERS:
                if (port := free_port(HOST)) not in taken:
                    taken.add(port)
                    ports.append(port)

    @contextmanager
    def running(self) -> Iterator[Stack]:
        """Run the servers, and a stack that uses them."""
        try:
            for number in range(SERVERS):
                self.start(number)
            wait_until(self.is_whole, 20, "routes between all servers")
            with serving(
                *("--bus-url", self.url, "--enable-deterministic-inference"),
                *("--no-responses-store", "--no-sessions-store"),
            ) as stack:
                yield stack
        finally:
            for process in self.processes.values():
                process.kill()
                process.wait(STOP_TIMEOUT_S)


@dataclass
class Relays:
    """Pass on the connections between servers, until they are cut."""

    up: bool = True
    _writers: set[asyncio.StreamWriter] = field(default_factory=set[asyncio.StreamWriter])

    @asynccontextmanager
    async def to(self, port: int) -> AsyncGenerator[int]:
        """A relay to this port; yields its own."""

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                there, onward = await asyncio.open_connection(HOST, port)
            except OSError:  # it has not started yet
                writer.close()
                return
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass_on(reader, onward))
                group.create_task(self._pass_on(there, writer))

        server = await asyncio.start_server(relay, HOST, 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            self.cut()

    def cut(self) -> None:
        """End all connections; there are no new ones until `up` is set."""
        self.up = False
        for writer in self._writers:
            writer.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while self.up and (data := await reader.read(2**16)):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.transport.abort()
            self._writers.discard(writer)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> NatsCluster:
    found = NatsCluster(tmp_path_factory.mktemp("nats"))
    found.choose_ports()
    return found


@pytest.fixture(scope="module")
def stack(cluster: NatsCluster) -> Iterator[Stack]:
    with cluster.running() as running:
        yield running


def texts(stack: Stack, fault: Callable[[], object] | None = None) -> list[object]:
    """What clients read while a fault happens with their first words out."""
    readers = [Reader(stack, number) for number in range(STREAMS)]
    for reader in readers:
        reader.start()
    if fault is not None:
        wait_until(lambda: all(reader.texts[0] for reader in readers), 30, "the first words")
        unread = [reader.is_alive() for reader in readers]
        fault()
        assert all(unread), "they had ended before the fault"
    for reader in readers:
        reader.join(DEADLINE_S)
        assert not reader.is_alive(), "a request hangs"
    assert [reader.error for reader in readers] == [None] * len(readers)
    return [(*reader.texts, reader.tokens, reader.usage) for reader in readers]


def test_death_of_any_server_loses_nothing(stack: Stack, cluster: NatsCluster) -> None:
    undisturbed = texts(stack)
    assert sum(map(cluster.connections, range(SERVERS))) >= 7
    for _ in range(SERVERS):
        wait_until(stack.healthy, 30, "healthy before the death of a server")
        victim = max(range(SERVERS), key=cluster.connections)
        assert cluster.connections(victim), "no process is connected to it"
        assert texts(stack, partial(cluster.kill, victim)) == undisturbed, f"server {victim}"
        cluster.start(victim)
        wait_until(cluster.is_whole, 20, "all routes again")


@pytest.mark.long
async def test_death_of_all_routes_loses_nothing(tmp_path: Path) -> None:
    """Processes reach only those at the same server, until there are routes again."""
    cluster, relays = NatsCluster(tmp_path), Relays()
    cluster.choose_ports()
    loop = asyncio.get_running_loop()

    def cut_for(seconds: float) -> None:
        loop.call_soon_threadsafe(relays.cut)
        wait_until(lambda: not any(map(cluster.route_count, range(SERVERS))), 5, "no routes")
        loop.call_soon_threadsafe(loop.call_later, seconds, setattr, relays, "up", True)

    async with AsyncExitStack() as entered:
        for port in cluster.routes:
            cluster.relays.append(await entered.enter_async_context(relays.to(port)))

        def read_all() -> None:
            with cluster.running() as stack:
                undisturbed = texts(stack)
                for seconds in (0.0, 3.0, 8.0):
                    assert texts(stack, partial(cut_for, seconds)) == undisturbed, seconds
                    wait_until(cluster.is_whole, 20, "all routes again")
                    wait_until(stack.healthy, 30, "healthy again")

        await asyncio.to_thread(read_all)
