"""The scheduler as a service on a bus in memory, among peers that only beat and listen."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Self

import pytest
from msgspec.structs import replace
from tests.support.memory_bus import MemoryBroker, MemoryTransport
from tests.support.services import QUICK, Running, running
from tests.support.wait import until
from tests.support.worker import blocks_stored
from tests.unit.scheduler.stage import WORKER_LOAD, cancel_request, open_entry, submit_request

from antiphon.model_worker.protocol.kv_events import KvEventPublisher
from antiphon.scheduler.service import SchedulerService
from antiphon.service.endpoint import Endpoint, RequestEndpoint, StreamEndpoint
from antiphon.service.service import Report, Runtime
from antiphon.wire.base import Process, Role
from antiphon.wire.command import Abort, Admit, Command, CommandBatch
from antiphon.wire.errors import Cancelled, Unavailable
from antiphon.wire.ids import ModelName, RequestId
from antiphon.wire.routes import CANCEL, COMMAND, KV_EVENTS, KV_REPLAY, OPEN, SUBMIT
from antiphon.wire.submit import CancelAccepted, OpenList, SubmitAccepted

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from antiphon.wire.kv_events import KvReplayed, ReplayKv
    from antiphon.wire.submit import OpenRequest, SubmitRequest

MODEL = ModelName("antiphon-small")
LATE_LISTS = ("antiphon_late_messages_total", {"route": OPEN.name})
TRACE = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"


class Peer:
    role = Role.DETOKENIZER

    @asynccontextmanager
    async def lifespan(self, runtime: Runtime) -> AsyncGenerator[Self]:
        self.runtime = runtime
        yield self

    def endpoints(self) -> Sequence[Endpoint]:
        return []

    def model(self) -> ModelName | None:
        return MODEL

    def report(self) -> Report:
        return Report(load=0)

    async def drain(self) -> None:
        pass


class FakeWorker(Peer):
    """Has capacity for one request, and stores the commands that it receives."""

    role = Role.WORKER

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.cache: KvEventPublisher | None = None

    def endpoints(self) -> Sequence[Endpoint]:
        here = {"worker": self.runtime.process.instance}
        return [
            StreamEndpoint(route=COMMAND, apply=self._obey, address=here),
            RequestEndpoint(route=KV_REPLAY, handler=self._replay, address=here),
        ]

    async def announce(self, *blocks: bytes, lost: bool = False) -> None:
        """Add blocks to the cache and publish the event, unless it is to be lost."""
        if self.cache is None:
            self.cache = KvEventPublisher(self.runtime.process, 2)
        self.cache.add([blocks_stored(b"root", blocks)])
        worker = self.runtime.process.instance
        for message in self.cache.take():
            if not lost:
                self.runtime.bus.publish(KV_EVENTS, message, model=MODEL, worker=worker)

    def report(self) -> Report:
        kv_seq = 0 if self.cache is None else self.cache.seq
        return Report(load=0, worker=replace(WORKER_LOAD, running_max=1, kv_seq=kv_seq))

    async def _replay(self, message: ReplayKv, _: object) -> KvReplayed:
        assert self.cache is not None
        return self.cache.replay(message)

    def _obey(self, batch: CommandBatch) -> None:
        self.commands += batch.commands


class FakeGateway(Peer):
    role = Role.GATEWAY

    def __init__(self) -> None:
        self.open: dict[RequestId, OpenRequest] = {}
        self._version = 0

    @asynccontextmanager
    async def lifespan(self, runtime: Runtime) -> AsyncGenerator[Self]:
        self.runtime = runtime
        runtime.group.create_task(self._list())
        yield self

    def model(self) -> ModelName | None:
        return None

    def request(self, name: str) -> SubmitRequest:
        due_ms = self.runtime.clock.unix_ms() + 60_000
        request = submit_request(name, self.process, due_ms, MODEL, traceparent=TRACE)
        self.open[request.request_id] = open_entry(request)
        return request

    async def submit(self, request: SubmitRequest) -> SubmitAccepted:
        return await self.runtime.bus.call(SUBMIT, request, timeout_s=2, model=MODEL)

    async def submit_when_known(self, request: SubmitRequest) -> SubmitAccepted:
        """Submit again, as a gateway does, until the leader has received its heartbeat."""
        async with asyncio.timeout(5):
            while True:
                try:
                    return await self.submit(request)
                except Unavailable:
                    await asyncio.sleep(0.01)

    async def cancel(self, request: SubmitRequest) -> CancelAccepted:
        cancel = cancel_request(request)
        return await self.runtime.bus.call(CANCEL, cancel, timeout_s=2, model=MODEL)

    @property
    def process(self) -> Process:
        return self.runtime.process

    async def _list(self) -> None:
        while True:
            self._version += 1
            change = OpenList(
                model=MODEL,
                owner=self.process,
                version=self._version,
                whole=True,
                opened=tuple(self.open.values()),
                not_after_unix_ms=self.runtime.clock.unix_ms() + 1000,
            )
            self.runtime.bus.publish(OPEN, change, model=MODEL)
            await asyncio.sleep(0.02)


class Cluster:
    """One of each, and as many schedulers as a test starts."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._broker = MemoryBroker()
        self.worker = FakeWorker()
        self.gateway = FakeGateway()
        self.schedulers: list[Running[SchedulerService]] = []

    async def start(self) -> None:
        for service in (self.worker, self.gateway, Peer()):
            await self._stack.enter_async_context(running(service, MemoryTransport(self._broker)))

    async def scheduler(self) -> SchedulerService:
        name = f"scheduler-{len(self.schedulers)}"
        up = running(SchedulerService, MemoryTransport(self._broker), instance=name)
        scheduler = await self._stack.enter_async_context(up)
        self.schedulers.append(scheduler)
        return scheduler.service

    async def leader(self) -> SchedulerService:
        scheduler = await self.scheduler()
        await until(lambda: leads(scheduler))
        return scheduler

    @property
    def admits(self) -> list[Admit]:
        return [command for command in self.worker.commands if isinstance(command, Admit)]

    @property
    def aborts(self) -> list[Abort]:
        return [command for command in self.worker.commands if isinstance(command, Abort)]


@pytest.fixture
async def cluster() -> AsyncGenerator[Cluster]:
    async with AsyncExitStack() as stack:
        cluster = Cluster(stack)
        await cluster.start()
        yield cluster


def leads(scheduler: SchedulerService) -> bool:
    return scheduler.report().leads is not None


async def test_a_submitted_request_reaches_the_worker_in_the_same_trace(cluster: Cluster) -> None:
    scheduler = await cluster.leader()
    accepted = await cluster.gateway.submit(cluster.gateway.request("r"))
    assert accepted.term == scheduler.report().leads
    await until(lambda: bool(cluster.admits))
    assert cluster.admits[0].traceparent is not None
    assert cluster.admits[0].traceparent[3:35] == TRACE[3:35]
    text = cluster.schedulers[0].metrics.text().decode()
    assert 'antiphon_scheduler_scheduled_reqs_total{worker="worker-0"} 1.0' in text
    assert "antiphon_queue_time_seconds_count 1.0" in text


async def test_what_waits_is_counted_and_a_refusal_has_its_reason(cluster: Cluster) -> None:
    await cluster.leader()
    for number in range(5):
        await cluster.gateway.submit(cluster.gateway.request(f"r{number}"))
    metrics = cluster.schedulers[0].metrics
    await until(lambda: b"antiphon_num_queue_reqs 2.0" in metrics.text())
    assert b'antiphon_scheduler_worker_capacity{worker="worker-0"} 0.0' in metrics.text()
    request = cluster.gateway.request("gone")
    await cluster.gateway.cancel(request)
    with pytest.raises(Cancelled):
        await cluster.gateway.submit(request)
    assert b'antiphon_scheduler_rejected_reqs_total{reason="cancelled"} 1.0' in metrics.text()


async def test_open_list_that_came_too_late_is_counted(cluster: Cluster) -> None:
    scheduler = await cluster.leader()
    gateway = cluster.gateway
    late = OpenList(
        model=MODEL, owner=gateway.process, version=2**20, whole=True, not_after_unix_ms=0
    )
    before = cluster.schedulers[0].metrics.registry.get_sample_value(*LATE_LISTS) or 0
    gateway.runtime.bus.publish(OPEN, late, model=MODEL)
    sample = cluster.schedulers[0].metrics.registry.get_sample_value
    await until(lambda: sample(*LATE_LISTS) == before + 1)
    assert (await gateway.submit(gateway.request("r"))).term == scheduler.report().leads


async def test_a_cancelled_request_is_aborted_at_its_worker(cluster: Cluster) -> None:
    await cluster.leader()
    request = cluster.gateway.request("r")
    await cluster.gateway.submit(request)
    await until(lambda: bool(cluster.admits))
    await cluster.gateway.cancel(request)
    await until(lambda: bool(cluster.aborts))
    assert cluster.aborts[0].attempt == cluster.admits[0].attempt


async def test_a_standby_takes_submits_once_the_leader_has_left(cluster: Cluster) -> None:
    await cluster.leader()
    standby = await cluster.scheduler()
    first = await cluster.gateway.submit(cluster.gateway.request("r0"))
    assert not leads(standby)
    await cluster.schedulers[0].ended()
    await until(lambda: leads(standby))
    second = await cluster.gateway.submit_when_known(cluster.gateway.request("r1"))
    assert second.term > first.term


async def test_a_lone_scheduler_that_stops_first_binds_what_waits(cluster: Cluster) -> None:
    await cluster.leader()
    for number in range(4):
        await cluster.gateway.submit(cluster.gateway.request(f"r{number}"))
    await until(lambda: len(cluster.admits) == 3)
    async with asyncio.TaskGroup() as group:
        ended = group.create_task(cluster.schedulers[0].ended())
        await asyncio.sleep(0)
        assert not ended.done()
        cluster.gateway.open.pop(RequestId("r0"))
        await until(lambda: any(admit.request_id == "r3" for admit in cluster.admits))


async def test_leader_and_standby_know_reported_and_missed_events(cluster: Cluster) -> None:
    blocks = [bytes([number]) * 32 for number in range(6)]
    await cluster.leader()
    await cluster.worker.announce(blocks[0], lost=True)
    await cluster.worker.announce(blocks[1])
    await until(lambda: known(cluster, 0) == 2)
    await cluster.scheduler()
    await until(lambda: known(cluster, 1) == 2)
    for block in blocks[2:]:
        await cluster.worker.announce(block, lost=True)
    # More events than the worker stores, and only its heartbeats show that there were any.
    await until(lambda: known(cluster, 0) == known(cluster, 1) == len(blocks))


def known(cluster: Cluster, scheduler: int) -> float | None:
    registry = cluster.schedulers[scheduler].metrics.registry
    return registry.get_sample_value("antiphon_scheduler_known_blocks")


def failing(scheduler: SchedulerService, monkeypatch: pytest.MonkeyPatch) -> None:
    leader = scheduler._core
    real = leader.tick

    def tick(*, link_up: bool, joins: int) -> None:
        real(link_up=link_up, joins=joins)
        if leader.term is not None:
            raise AssertionError("a bug, on purpose")

    monkeypatch.setattr(leader, "tick", tick)


async def test_a_standby_leads_while_the_leader_fails_each_time(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty = await cluster.leader()
    standby = await cluster.scheduler()
    await until(lambda: standby._core._leadership.highest is not None)
    failing(faulty, monkeypatch)
    await until(lambda: leads(standby))
    accepted = await cluster.gateway.submit_when_known(cluster.gateway.request("r"))
    assert accepted.term == standby.report().leads
    await until(lambda: bool(cluster.admits))
    text = cluster.schedulers[0].metrics.text().decode()
    assert "antiphon_scheduler_failed_terms_total 1.0" in text


async def test_a_lone_leader_that_fails_each_time_takes_few_terms(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = await cluster.leader()
    began_at = asyncio.get_running_loop().time()
    failing(scheduler, monkeypatch)
    registry = cluster.schedulers[0].metrics.registry
    await until(lambda: registry.get_sample_value("antiphon_scheduler_failed_terms_total") == 4)
    took_s = asyncio.get_running_loop().time() - began_at
    least_beats = 1 + 2 + 4  # half of each pause between the four
    assert took_s >= least_beats * QUICK.service.heartbeat_s
