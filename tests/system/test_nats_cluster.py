"""Three NATS servers in a cluster: any one of them dies under load, and no stream loses a word."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.error
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from tests.system.stack import STOP_TIMEOUT_S, read, serving, wait_until
from tests.system.test_migration import DEADLINE_S, STREAMS, Reader

from antiphon.bus.server import find
from antiphon.supervisor.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.system.stack import Stack

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

SERVERS = 3
HOST = "127.0.0.1"


@dataclass
class NatsCluster:
    """Real servers, which know each other by their routes."""

    folder: Path
    ports: list[int] = field(default_factory=list[int])
    monitoring: list[int] = field(default_factory=list[int])
    routes: list[int] = field(default_factory=list[int])
    processes: dict[int, subprocess.Popen[bytes]] = field(
        default_factory=dict[int, "subprocess.Popen[bytes]"]
    )

    @property
    def url(self) -> str:
        return ",".join(f"nats://{HOST}:{port}" for port in self.ports)

    def start(self, number: int) -> None:
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
                    *("--routes", ",".join(f"nats://{HOST}:{port}" for port in self.routes)),
                ],
                stdout=log,
                stderr=log,
            )

    def is_whole(self) -> bool:
        """Whether each server has routes to all others."""
        try:
            pages = [read(f"http://{HOST}:{port}/varz") for port in self.monitoring]
        except (urllib.error.URLError, OSError):
            return False
        return all(json.loads(page)["routes"] >= SERVERS - 1 for page in pages)

    def connections(self, number: int) -> int:
        return json.loads(read(f"http://{HOST}:{self.monitoring[number]}/varz"))["connections"]

    def kill(self, number: int) -> None:
        os.kill(self.processes[number].pid, signal.SIGKILL)
        self.processes[number].wait(STOP_TIMEOUT_S)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsCluster]:
    found = NatsCluster(tmp_path_factory.mktemp("nats"))
    taken: set[int] = set()
    for ports in (found.ports, found.monitoring, found.routes):
        while len(ports) < SERVERS:
            if (port := free_port(HOST)) not in taken:
                taken.add(port)
                ports.append(port)
    try:
        for number in range(SERVERS):
            found.start(number)
        wait_until(found.is_whole, 20, "routes between all servers")
        yield found
    finally:
        for process in found.processes.values():
            process.kill()
            process.wait(STOP_TIMEOUT_S)


@pytest.fixture(scope="module")
def stack(cluster: NatsCluster) -> Iterator[Stack]:
    with serving(
        *("--bus-url", cluster.url, "--enable-deterministic-inference"),
        *("--no-responses-store", "--no-sessions-store"),
    ) as running:
        yield running


def texts(stack: Stack, cluster: NatsCluster, victim: int | None = None) -> list[object]:
    """What clients read while a server is killed with their first words out."""
    readers = [Reader(stack, number) for number in range(STREAMS)]
    for reader in readers:
        reader.start()
    if victim is not None:
        wait_until(lambda: all(reader.texts[0] for reader in readers), 30, "the first words")
        cluster.kill(victim)
        assert all(reader.is_alive() for reader in readers), "they had ended before the kill"
    for reader in readers:
        reader.join(DEADLINE_S)
        assert not reader.is_alive(), "a request hangs"
    assert [reader.error for reader in readers] == [None] * len(readers)
    return [(*reader.texts, reader.tokens, reader.usage) for reader in readers]


def test_death_of_any_server_loses_nothing(stack: Stack, cluster: NatsCluster) -> None:
    undisturbed = texts(stack, cluster)
    assert sum(map(cluster.connections, range(SERVERS))) >= 7
    for _ in range(SERVERS):
        wait_until(stack.healthy, 30, "healthy before the death of a server")
        victim = max(range(SERVERS), key=cluster.connections)
        assert cluster.connections(victim), "no process is connected to it"
        assert texts(stack, cluster, victim) == undisturbed, f"server {victim}"
        cluster.start(victim)
        wait_until(cluster.is_whole, 20, "all routes again")
