"""Pages to and from kv_storage on loopback, against raw TCP: `python -m tests.bench.transfer`.

A node in a process of its own, and a worker's client with the pages of the 135M shape. Expected on
Zen 4, in CPU time a gigabyte: 0.12 s to send, 0.13 to receive, 0.22 into the memory of a full node,
0.16 for a checksum, 0.1 to copy. On two cores raw TCP should take 0.26 s; a fetch, which sends in
one process and does the rest in the other, 0.4; a save, which the worker copies, hashes and sends
while the node receives, 0.4 to 0.45. The target is half of raw TCP for both. The node is filled
first, so that memory is used again, as in one that has run for a while.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import uvloop
from tests.bench.summary import Measurement, arguments, here, measured, report, single
from tests.support.nats import NatsServer
from tests.support.page_store import PageStoreUsers
from tests.support.services import CLUSTER, QUICK, running
from tests.support.wait import until

from antiphon.bus.nats import NatsTransport
from antiphon.config.load import child_environment
from antiphon.config.settings import BusConfig, CacheConfig, ClusterConfig, Settings
from antiphon.model_worker.cache.groups import CacheGroup, CacheTensor, GroupKind
from antiphon.model_worker.protocol.page_store import PageStoreMetrics
from antiphon.service.main import tune_gc
from antiphon.wire.digests import BLOCK_TOKENS
from antiphon.wire.namespaces import PageOrigin, cache_namespace

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from tests.support.page_store import PageStoreUser

    from antiphon.model_worker.cache.codec import BlockPages

ROUNDS = 21
CASES = {"12 blocks": 12, "64 blocks": 64}
PAGE_TOKENS = 16
BLOCK_PAGES = BLOCK_TOKENS // PAGE_TOKENS
NAMESPACE = cache_namespace(PageOrigin(model_digest="model", weights="1"))
NODE_BYTES = 256 * 1024**2
TICKS_S = os.sysconf("SC_CLK_TCK")
_KEYS = CacheTensor(name="keys", dtype="bfloat16", shape=(3, 64))
GROUP = CacheGroup(
    kind=GroupKind.FULL,
    layers=tuple(range(30)),
    tensors=(_KEYS, msgspec.structs.replace(_KEYS, name="values")),
    page_tokens=PAGE_TOKENS,
    pages_total=2 * max(CASES.values()) * BLOCK_PAGES,
)
BLOCK_BYTES = BLOCK_PAGES * GROUP.page_bytes
SENDER = """
import os, socket, sys
size, data = int(sys.argv[1]), os.urandom(int(sys.argv[1]))
listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
while True:
    connection, _ = listening.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(int.from_bytes(connection.recv(8), "little")):
            connection.sendall(data)
"""
"""Sends blocks from one warm buffer, in a process of its own, as many as it is asked for."""


@contextmanager
def process(*command: str, environment: dict[str, str] | None = None) -> Iterator[subprocess.Popen]:
    started = subprocess.Popen(
        [sys.executable, *command], env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        yield started
    finally:
        started.kill()
        started.wait()


def receive(port: int, blocks: int) -> None:
    """Receive blocks of raw TCP into one warm buffer."""
    buffer = memoryview(bytearray(BLOCK_BYTES))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(blocks.to_bytes(8, "little"))
        for _ in range(blocks):
            rest = buffer
            while rest:
                rest = rest[connection.recv_into(rest) :]


def prompt(blocks: int, number: int) -> bytes:
    """The ids of a prompt of so many blocks that begins like no other."""
    first = number.to_bytes(4, "little") * BLOCK_TOKENS
    return first + bytes(4 * BLOCK_TOKENS * (blocks - 1))


def pages(blocks: int, first: int = 0) -> list[BlockPages]:
    starts = range(first, first + blocks * BLOCK_PAGES, BLOCK_PAGES)
    return [(tuple(range(start, start + BLOCK_PAGES)),) for start in starts]


def cpu_s(*pids: int) -> float:
    """CPU time of processes so far, of all their threads."""
    stats = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids)
    return sum(int(user) + int(system) for *_, user, system in (s[:13] for s in stats)) / TICKS_S


@dataclass
class Arm:
    """What one way of moving pages took, round by round; `pid` is the process at its other end."""

    pid: int
    gb_s: list[float] = field(default_factory=list[float])
    cpu_s: float = 0.0

    @asynccontextmanager
    async def timed(self, size_bytes: int) -> AsyncGenerator[None]:
        cpu_before, began = cpu_s(os.getpid(), self.pid), time.perf_counter()
        yield
        self.gb_s.append(size_bytes / 1e9 / (time.perf_counter() - began))
        self.cpu_s += cpu_s(os.getpid(), self.pid) - cpu_before


class Stored(PageStoreMetrics):
    """Counts what a client knows to be stored; `wait` for so many more blocks."""

    def __init__(self, metrics: PageStoreMetrics) -> None:
        self._saves, self._fetches = metrics._saves, metrics._fetches
        self._left = 0
        self._all = asyncio.Event()

    def expect(self, blocks: int) -> None:
        self._left = blocks
        self._all.clear()

    def saved(self, stored: int, refused: int) -> None:
        super().saved(stored, refused)
        self._left -= stored
        if self._left <= 0:
            self._all.set()

    async def wait(self) -> None:
        async with asyncio.timeout(30):
            await self._all.wait()


async def measure_round(
    worker: PageStoreUser,
    stored: Stored,
    arms: dict[str, Arm],
    port: int,
    blocks: int,
    number: int,
) -> None:
    """A save, a fetch and raw TCP of as many bytes, one after the other."""
    ids, size = prompt(blocks, number), blocks * BLOCK_BYTES
    stored.expect(blocks)
    async with arms["save"].timed(size):
        await worker.save(NAMESPACE, ids, pages(blocks))
        await stored.wait()
    async with arms["fetch"].timed(size):
        found = await worker.fetch(NAMESPACE, ids, pages(blocks, blocks * BLOCK_PAGES))
    assert found == blocks, "all blocks are there"
    async with arms["raw TCP"].timed(size):
        await asyncio.to_thread(receive, port, blocks)


async def measure(case: str, rounds: int) -> list[Measurement]:
    blocks = CASES[case]
    async with NatsServer() as nats:
        settings = Settings(
            cluster=ClusterConfig(name=CLUSTER),
            bus=BusConfig(url=nats.url),
            health=QUICK.health,
            cache=CacheConfig(save_bytes_max=NODE_BYTES),
        )
        flags = ("--cluster-name", CLUSTER, "--bus-url", nats.url)
        memory = ("--kv-storage-ram-bytes-max", str(NODE_BYTES), "--health-port", "0")
        named = ("--instance", "kv_storage-0", "--parent-pid", str(os.getpid()))
        node = process(
            *("-m", "antiphon.kv_storage", *named, *flags, *memory),
            environment=child_environment(Settings()),
        )
        with node as storage, process("-c", SENDER, str(BLOCK_BYTES)) as sender:
            assert sender.stdout is not None
            port = int(sender.stdout.readline())
            transport = NatsTransport(settings.bus, name="bench")
            async with running(PageStoreUsers([GROUP]), transport, settings=settings) as worker:
                service = worker.service
                await until(lambda: service.client.available, 30)
                service.fill(1)
                service.client._metrics = stored = Stored(service.client._metrics)
                ends = {"save": storage, "fetch": storage, "raw TCP": sender}
                arms = {name: Arm(end.pid) for name, end in ends.items()}
                warm_up = {name: Arm(end.pid) for name, end in ends.items()}
                until_full = range(2 + NODE_BYTES // (blocks * BLOCK_BYTES))
                for number in until_full:
                    await measure_round(service, stored, warm_up, port, blocks, number)
                tune_gc()  # as in a service
                for number in range(len(until_full), len(until_full) + rounds):
                    await measure_round(service, stored, arms, port, blocks, number)
    return list(_rows(case, arms))


def _rows(case: str, arms: dict[str, Arm]) -> Iterator[Measurement]:
    size_gb, raw = CASES[case] * BLOCK_BYTES / 1e9, arms["raw TCP"]
    for name, arm in arms.items():
        yield measured("GB/s", arm.gb_s, case=case, arm=name)
        yield single("cpu_s/GB", arm.cpu_s / len(arm.gb_s) / size_gb, case=case, arm=name)
        if arm is not raw:
            ratios = [one / other for one, other in zip(arm.gb_s, raw.gb_s, strict=True)]
            yield measured("ratio", ratios, case=case, arm=name, against="raw TCP")


def main() -> None:
    given = arguments(description=__doc__, rounds=ROUNDS, file="transfer.json").parse_args()
    rows = [row for case in CASES for row in uvloop.run(measure(case, given.rounds))]
    setup = {"rounds": given.rounds, "block_bytes": BLOCK_BYTES, "node_bytes": NODE_BYTES}
    report(here("transfer", setup, rows), given.json)


if __name__ == "__main__":
    main()
