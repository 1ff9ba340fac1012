"""The worker as a service on a bus, with a runner that needs no model."""

from __future__ import annotations

import threading
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.simulation.hash_runner import HashRunner
from tests.support.matchers import advance_inline
from tests.support.memory_bus import MemoryBroker, MemoryTransport
from tests.support.services import QUICK, Running, client_bus, running
from tests.support.wait import until
from tests.support.worker import ColumnReader, limits, page_group, process

from antiphon.config.cluster import digest
from antiphon.model_card.served_model import served_name
from antiphon.model_worker.batching.engine_core import EngineCore
from antiphon.model_worker.cache.events import BlockTracker
from antiphon.model_worker.cache.pages import CachePools
from antiphon.model_worker.cache.pool import PagePool
from antiphon.model_worker.cache.radix import RadixIndex
from antiphon.model_worker.observability.step_accounting import StepAccounting
from antiphon.model_worker.protocol.held_request import HeldChoice
from antiphon.model_worker.protocol.worker_output import WorkerOutput
from antiphon.model_worker.service import ModelWorker
from antiphon.model_worker.startup.engine import Engine
from antiphon.service.clock import Clock, SystemClock
from antiphon.service.followed_lists import RUNNING_LIST_READS, FollowedLists, running_content
from antiphon.service.inbox import SharedStateBroken
from antiphon.service.startup import CannotStart
from antiphon.wire.base import Attempt, FinishReason, Process, ProcessState, Role, Term
from antiphon.wire.codec import pack_ids, unpack_ids
from antiphon.wire.command import (
    Abort,
    Admit,
    ChoiceOutput,
    Command,
    CommandBatch,
    ControlDone,
    DrainWorker,
    FlushCache,
    ResendTokens,
    StopChoice,
)
from antiphon.wire.digests import block_digests
from antiphon.wire.heartbeat import (
    FetchRunningList,
    Heartbeat,
    RefusalReason,
    RefusedCommands,
    RunningList,
    RunningRequest,
    WorkerLoad,
)
from antiphon.wire.ids import RequestId
from antiphon.wire.kv_events import BlocksCleared, BlocksStored, KvEvents, KvReplayed, ReplayKv
from antiphon.wire.namespaces import PageOrigin, announced_root, cache_namespace
from antiphon.wire.routes import (
    COMMAND,
    HEARTBEAT,
    KV_EVENTS,
    KV_REPLAY,
    OPEN,
    RUNNING,
    RUNNING_FETCH,
    STOP,
    TOKENS,
    WORKER_CONTROL,
)
from antiphon.wire.sampling import SamplingParams
from antiphon.wire.submit import OpenList
from antiphon.wire.tokens import TokenBatch

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from antiphon.bus.bus import Bus, Delivery
    from antiphon.config.settings import Settings
    from antiphon.model_worker.batching.plan import (
        Ints,
        PlanRunner,
        SamplingPart,
        StepOutcome,
        StepPlan,
    )
    from antiphon.model_worker.control import ControlMessage
    from antiphon.service.service import Runtime, Service
    from antiphon.wire.tokens import TokenRow

VOCAB_SIZE = 50


DETOKENIZER, GATEWAY = process("detokenizer-0"), process("gateway-0")
TERM = Term(number=1, scheduler=process("scheduler-0"))


class WorkerFactory:
    """Starts a worker with the engine that `opener` makes."""

    role = Role.WORKER

    def __init__(self, opener: Callable[[Settings], Engine]) -> None:
        self._opener = opener

    def lifespan(self, runtime: Runtime) -> AbstractAsyncContextManager[ModelWorker]:
        return ModelWorker.lifespan(runtime, self._opener)


def open_hash_engine(settings: Settings) -> Engine:
    pools = CachePools([page_group(64, page_tokens=16)])
    small = limits(
        step_tokens_max=64,
        chunk_tokens=32,
        running_max=min(8, settings.batching.running_max),
        context_tokens=1024,
        vocab_size=VOCAB_SIZE,
        end_ids=frozenset(),
        weights_digest="",
    )
    core = advance_inline(EngineCore(small, pools, RadixIndex(pools, tracker=BlockTracker())))
    return Engine(core, HashRunner(pools.groups, VOCAB_SIZE))


class Stage:
    """A worker on a memory bus, and a client that plays all other services."""

    def __init__(self, broker: MemoryBroker, worker: Running[Service], bus: Bus) -> None:
        self.broker = broker
        self.worker = worker
        self.bus = bus
        self.batches: list[TokenBatch] = []
        self.rows: list[TokenRow] = []
        self.reader = ColumnReader()
        self.beats: list[Heartbeat] = []
        self.kv_events: list[KvEvents] = []
        self.running: list[RunningList] = []
        self.copies = FollowedLists(running_content)
        self.commands = 0
        self.lists = 0
        self.meet()

    async def listen(self) -> None:
        await self.bus.listen(TOKENS, self._tokens, detokenizer=DETOKENIZER.instance)
        await self.bus.listen(HEARTBEAT, self._beat, role="worker")
        await self.bus.listen(KV_EVENTS, self._kv)
        await self.bus.listen(RUNNING, self._running)
        # So that the leader is known before the first command: messages of two subjects race.
        await until(lambda: bool(self.beats))

    def meet(
        self, leader: Process = TERM.scheduler, ahead_s: float = 0.0, reads: tuple[str, ...] = ()
    ) -> None:
        """Send the worker a heartbeat of a leader whose clock is so far ahead of its own."""
        sent_ms = SystemClock().unix_ms() + round(1000 * ahead_s)
        beat = Heartbeat(
            role=Role.SCHEDULER,
            process=leader,
            state=ProcessState.READY,
            config_digest=digest(self.worker.around.settings.cluster),
            health_port=0,
            load=0,
            reads=reads,
            sent_unix_ms=sent_ms,
            not_after_unix_ms=sent_ms + 2_500,
        )
        self.bus.publish(HEARTBEAT, beat, role=Role.SCHEDULER, instance=leader.instance)

    async def _tokens(self, delivery: Delivery) -> None:
        batch = delivery.read(TOKENS)
        assert isinstance(batch, TokenBatch)
        self.batches.append(batch)
        self.rows += self.reader.rows(batch)

    async def _kv(self, delivery: Delivery) -> None:
        self.kv_events.append(delivery.read(KV_EVENTS))

    async def _running(self, delivery: Delivery) -> None:
        message = delivery.read(RUNNING)
        self.running.append(message)
        self.copies.update(message.worker, message, 0.0)

    async def _beat(self, delivery: Delivery) -> None:
        self.beats.append(delivery.read(HEARTBEAT))

    @property
    def load(self) -> WorkerLoad:
        """What the last heartbeat reports."""
        load = self.beats[-1].worker
        assert load is not None
        return load

    @property
    def held(self) -> tuple[RunningRequest, ...]:
        """What the worker lists, in heartbeats or by changes."""
        load, worker = self.load, self.worker.process
        if load.listed is None:
            return load.running
        change = self.copies.compare(worker, load.listed, 0.0)
        lines = None if change is None else change.lines
        return () if lines is None else tuple(lines.values())

    def ids(self, request_id: str) -> list[int]:
        rows = [row for row in self.rows if row.request_id == request_id]
        return [token for row in rows for token in unpack_ids(row.token_ids)]

    def ended(self, request_id: str) -> bool:
        return any(r.request_id == request_id and r.finish_reason for r in self.rows)

    async def command(self, *commands: Command, leader: Term = TERM, valid_s: float = 5.0) -> None:
        self.commands += 1
        batch = CommandBatch(
            leader=leader,
            worker=self.worker.process,
            seq=self.commands,
            commands=commands,
            not_after_unix_ms=SystemClock().unix_ms() + round(1000 * valid_s),
        )
        self.bus.publish(COMMAND, batch, worker=self.worker.process.instance)

    async def start(self, command: Admit) -> None:
        """Admit a request, and wait for its first tokens."""
        await self.command(command)
        await until(lambda: bool(self.ids(command.request_id)))

    async def finish(self, command: Admit) -> None:
        """Admit a request, and wait for its end."""
        await self.command(command)
        await until(lambda: self.ended(command.request_id))

    async def control(self, message: ControlMessage) -> ControlDone:
        worker = self.worker.process.instance
        return await self.bus.call(WORKER_CONTROL, message, timeout_s=5.0, worker=worker)

    def stop(self, message: StopChoice | ResendTokens) -> None:
        self.bus.publish(STOP, message, worker=self.worker.process.instance)

    @property
    def transport(self) -> MemoryTransport:
        transport = self.worker.around.bus.transport
        assert isinstance(transport, MemoryTransport)
        return transport

    def metric(self, name: str, **labels: str) -> float | None:
        return self.worker.metrics.registry.get_sample_value(f"antiphon_{name}", labels)

    def decoded(self) -> float | None:
        return self.metric("realtime_tokens_total", mode="decode")

    async def close(self, *request_ids: str, valid_s: float = 5.0) -> None:
        """The owner has ended these."""
        self.lists += 1
        model = served_name(QUICK)
        closed = OpenList(
            model=model,
            owner=GATEWAY,
            version=self.lists,
            whole=False,
            closed=tuple(map(RequestId, request_ids)),
            not_after_unix_ms=SystemClock().unix_ms() + round(1000 * valid_s),
        )
        self.bus.publish(OPEN, closed, model=model)

    async def load_is(self, requests: int) -> None:
        self.beats.clear()
        await until(lambda: bool(self.beats) and self.beats[-1].load == requests)


def admit(name: str, max_new_tokens: int = 5, prompt: Sequence[int] = (1, 2, 3)) -> Admit:
    return Admit(
        request_id=RequestId(name),
        owner=GATEWAY,
        attempt=Attempt(term=TERM, n=1),
        detokenizer=DETOKENIZER.instance,
        prompt_ids=pack_ids(prompt),
        choices=(ChoiceOutput(choice=0),),
        sampling=SamplingParams(max_new_tokens=max_new_tokens),
        columns=True,
        deadline_unix_ms=SystemClock().unix_ms() + 60_000,
    )


def abort(name: str) -> Abort:
    return Abort(request_id=RequestId(name), attempt=Attempt(term=TERM, n=1))


@asynccontextmanager
async def staged(
    opener: Callable[[Settings], Engine] = open_hash_engine,
    settings: Settings = QUICK,
    clock: Clock | None = None,
) -> AsyncGenerator[Stage]:
    broker = MemoryBroker()
    async with (
        client_bus(MemoryTransport(broker), party="client") as bus,
        running(
            WorkerFactory(opener), MemoryTransport(broker), settings=settings, clock=clock
        ) as worker,
    ):
        stage = Stage(broker, worker, bus)
        await stage.listen()
        yield stage
        # Else the worker would linger for owners that never come.
        await stage.close(*{row.request_id for row in stage.rows})


@pytest.fixture
async def stage() -> AsyncGenerator[Stage]:
    async with staged() as stage:
        yield stage


async def test_an_admitted_request_is_answered_with_numbered_tokens(stage: Stage) -> None:
    await stage.finish(admit("a"))
    assert len(stage.ids("a")) == 5
    assert [batch.seq for batch in stage.batches] == list(range(1, len(stage.batches) + 1))
    assert stage.rows[0].stream is not None
    assert stage.rows[-1].finish_reason is FinishReason.LENGTH


async def test_the_heartbeat_reports_pages_load_and_running_requests(stage: Stage) -> None:
    await stage.command(admit("a", 900))
    await stage.load_is(1)
    load = stage.load
    await until(lambda: [line.request_id for line in stage.held] == ["a"])
    assert (load.term, load.commands_seq, load.context_tokens) == (TERM, 1, 1024)
    await until(lambda: stage.ended("a"))
    await stage.load_is(0)
    load = stage.load
    assert load.pages_free == load.pages_total == 64
    await until(lambda: [line.ended for line in stage.held] == [True])
    assert load.step_age_s == 0.0
    assert stage.beats[-1].streams[0].receiver == DETOKENIZER.instance


async def test_schedulers_that_follow_the_running_list_are_sent_its_changes(stage: Stage) -> None:
    stage.meet(reads=RUNNING_LIST_READS)
    await until(lambda: stage.load.listed is not None)
    await stage.command(admit("a", 900))
    await until(lambda: stage.load.live == 1)
    assert not stage.load.running
    assert [line.request_id for one in stage.running for line in one.opened][:1] == ["a"]
    await until(lambda: stage.ended("a"))
    await until(lambda: stage.load.live == 0)
    fetch = FetchRunningList(worker=stage.worker.process)
    stage.bus.publish(RUNNING_FETCH, fetch, worker=stage.worker.process.instance)
    await until(lambda: stage.running[-1].whole)
    (line,) = stage.running[-1].opened
    assert line.ended


async def test_a_worker_whose_requests_are_to_migrate_lists_them_for_earlier_tools(
    stage: Stage,
) -> None:
    stage.meet(reads=RUNNING_LIST_READS)
    await stage.start(admit("a", 300))
    await stage.control(DrainWorker(migrate=True))
    await until(lambda: stage.load.hands_back)
    assert [line.request_id for line in stage.load.running] == ["a"]


def leader_ahead(ahead_s: float) -> Term:
    """A leader with a name that says how far its clock is ahead."""
    return Term(number=2, scheduler=process(f"scheduler-ahead-by-{ahead_s:g}"))


@pytest.mark.parametrize("ahead_s", [-4.9, -2.5, -1.5, 2.5, 4.9])
async def test_worker_obeys_a_leader_whose_clock_is_seconds_away(
    stage: Stage, ahead_s: float
) -> None:
    """Its commands count for 1.5 s, by its own clock."""
    leader = leader_ahead(ahead_s)
    stage.meet(leader.scheduler, ahead_s)
    await stage.command(admit("a"), leader=leader, valid_s=ahead_s + 1.5)
    await until(lambda: stage.ended("a"))
    await until(lambda: stage.load.term == leader)
    assert stage.load.refused is None


@pytest.mark.parametrize(
    ("ahead_s", "valid_s", "reason"),
    [
        (6.0, 7.5, RefusalReason.CLOCK),  # too far away: its heartbeats do not count
        (None, 1.5, RefusalReason.CLOCK),  # not heard yet
        (2.5, 2.0, RefusalReason.LATE),  # stood in the way for too long
    ],
)
async def test_worker_refuses_commands_by_a_clock_that_it_cannot_read(
    stage: Stage,
    caplog: pytest.LogCaptureFixture,
    ahead_s: float | None,
    valid_s: float,
    reason: RefusalReason,
) -> None:
    """It logs that in one line, counts it, and its heartbeat reports it to the leader."""
    leader = leader_ahead(ahead_s or 0.0)
    if ahead_s is not None:
        stage.meet(leader.scheduler, ahead_s)
    await stage.command(admit("a"), leader=leader, valid_s=valid_s)
    await stage.command(admit("b"), leader=leader, valid_s=valid_s)
    refused = RefusedCommands(leader=leader, seq=2, reason=reason)
    await until(lambda: stage.load.refused == refused)
    lines = [vars(record) for record in caplog.records if record.message == "commands refused"]
    assert [(line["leader"], line["reason"]) for line in lines] == [
        (leader.scheduler.instance, reason)
    ]
    assert stage.metric("refused_commands_total", reason=reason) == 2
    assert not stage.ids("a")


async def test_open_list_that_came_too_late_is_counted_and_ends_nothing(stage: Stage) -> None:
    await stage.start(admit("a", 900))
    await stage.close("a", valid_s=-1.0)
    await until(lambda: stage.metric("late_messages_total", route=OPEN.name) == 1)
    await stage.load_is(1)
    await stage.close("a")
    await stage.load_is(0)


async def test_an_abort_frees_the_request_and_sends_no_more(stage: Stage) -> None:
    await stage.start(admit("a", 900))
    await stage.command(abort("a"))
    await stage.load_is(0)
    assert not stage.ended("a")
    await until(lambda: stage.load.pages_free == 64)


async def test_a_stop_of_the_detokenizer_ends_the_choice(stage: Stage) -> None:
    await stage.start(admit("a", 900))
    stop = StopChoice(
        request_id=RequestId("a"),
        attempt=Attempt(term=TERM, n=1),
        detokenizer=DETOKENIZER,
        choice=0,
        offset=1,
    )
    stage.stop(stop)
    await stage.load_is(0)
    assert not stage.ended("a")


async def test_a_resend_brings_everything_again(stage: Stage) -> None:
    await stage.finish(admit("a"))
    ids = stage.ids("a")
    stage.rows.clear()
    stage.stop(ResendTokens(worker=stage.worker.process, detokenizer=DETOKENIZER))
    await until(lambda: stage.ended("a"))
    assert stage.ids("a") == ids


async def test_what_the_owner_closed_is_forgotten(stage: Stage) -> None:
    await stage.finish(admit("a"))
    await stage.close("a")
    await until(lambda: stage.load.live == 0 and stage.held == ())


async def test_tokens_of_an_outage_are_sent_after_it(stage: Stage) -> None:
    await stage.start(admit("a", 400))
    stage.broker.cut(stage.transport)
    await until(lambda: stage.decoded() == 400)
    assert not stage.ended("a")
    stage.broker.heal(stage.transport)
    await until(lambda: stage.ended("a"))
    assert len(stage.ids("a")) == 400
    assert [row.offset for row in stage.rows] == sorted(row.offset for row in stage.rows)


async def test_cached_blocks_are_announced_by_the_digests_of_the_prompt(stage: Stage) -> None:
    prompt = [token % VOCAB_SIZE for token in range(130)]
    await stage.finish(admit("a", prompt=prompt))
    await until(lambda: sum(len(message.events) for message in stage.kv_events) == 2)
    assert {message.worker for message in stage.kv_events} == {stage.worker.process}
    assert stage.kv_events[-1].seq == 2
    events = [event for message in stage.kv_events for event in message.events]
    stored = [event for event in events if isinstance(event, BlocksStored)]
    root = announced_root(cache_namespace(PageOrigin(model_digest="")))
    assert stored[0].parent == root
    assert b"".join(event.digests for event in stored) == block_digests(root, pack_ids(prompt))
    await stage.load_is(0)
    assert stage.load.kv_seq == 2


async def test_missed_kv_events_and_a_missed_flush_are_replayed(stage: Stage) -> None:
    prompt = [token % VOCAB_SIZE for token in range(70)]
    worker = stage.worker.process.instance
    await stage.start(admit("a", 300, prompt=prompt))
    stage.broker.cut(stage.transport)
    await until(lambda: stage.decoded() == 300)
    stage.broker.heal(stage.transport)
    await until(lambda: stage.ended("a"))
    await stage.load_is(0)
    seq, received = stage.load.kv_seq, stage.kv_events[-1].seq
    assert seq is not None
    assert seq > received, "nothing was lost"
    await stage.control(FlushCache())
    reply = await stage.bus.call(KV_REPLAY, ReplayKv(after=received), timeout_s=5.0, worker=worker)
    assert isinstance(reply, KvReplayed)
    assert reply.seq == seq + 1
    assert [type(event) for event in reply.events] == [BlocksStored, BlocksCleared]


async def test_a_flush_is_answered_by_an_idle_worker(stage: Stage) -> None:
    assert await stage.control(FlushCache()) == ControlDone(pages_freed=0)


@pytest.mark.parametrize("name", ["record", "begin", "drop"])
async def test_failing_metrics_cost_no_request_its_end_and_no_command_its_reply(
    stage: Stage, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepAccounting, name, fail)
    await stage.command(admit("a"), admit("b", 900))
    await until(lambda: stage.ended("a"))
    assert len(stage.ids("a")) == 5
    await stage.command(abort("b"))
    await stage.load_is(0)
    assert await stage.control(FlushCache())


@pytest.mark.parametrize(("owner", "name"), [(StepAccounting, "record"), (WorkerOutput, "started")])
async def test_failing_bookkeeping_keeps_no_request_from_being_given_back(
    owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with narrow(other=True, hand_back_s=60.0) as stage:
        await stage.start(admit("a", 900))
        monkeypatch.setattr(owner, name, fail)
        await stage.command(admit("b"))
        await stage.control(DrainWorker())
        await until(lambda: given_back(stage) == ["b"])
        await until(lambda: stage.ended("a"), 20.0)


def fail(*_: object, **__: object) -> None:
    raise AssertionError("a bug, on purpose")


async def test_a_drained_worker_finishes_what_runs_and_begins_nothing(stage: Stage) -> None:
    await stage.start(admit("a", 300))
    await stage.control(DrainWorker())
    assert stage.worker.health.state is ProcessState.DRAINING
    await stage.command(admit("b"))
    await until(lambda: stage.ended("a"))
    assert len(stage.ids("a")) == 300
    assert {row.request_id for row in stage.rows} == {"a"}


async def test_a_drained_worker_reports_that_it_hands_back_what_runs(stage: Stage) -> None:
    await stage.start(admit("a", 300))
    await stage.control(DrainWorker())
    assert not stage.load.hands_back
    await stage.control(DrainWorker(migrate=True))
    assert stage.load.hands_back
    assert [held.request_id for held in stage.load.running] == ["a"]


async def test_a_stopping_worker_leaves_once_its_owners_have_their_ends(stage: Stage) -> None:
    await stage.start(admit("a", 300))
    stage.worker.stop.set()
    await until(lambda: stage.ended("a"))
    assert not stage.worker.gone.is_set()
    await stage.close("a")
    await stage.worker.ended()


async def test_a_model_that_does_not_run_keeps_the_worker_from_starting() -> None:
    def open_broken(settings: Settings) -> Engine:
        engine = open_hash_engine(settings)
        runner = engine.runner
        assert isinstance(runner, HashRunner)
        runner.poisoned = lambda _plan, _row: True
        return engine

    with pytest.RaisesGroup(CannotStart, flatten_subgroups=True):
        async with running(WorkerFactory(open_broken), MemoryTransport(MemoryBroker())):
            pass


async def test_worker_survives_an_outcome_of_another_plan() -> None:
    async with staged(opener_of(WrongStep)) as stage:
        await stage.finish(admit("a"))
        (end,) = (row for row in stage.rows if row.finish_reason is not None)
        assert end.error is not None
        assert end.error.code == "internal"
        await stage.load_is(0)
        assert not stage.worker.gone.is_set()


async def test_worker_with_broken_pages_ends_and_logs_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.RaisesGroup(SharedStateBroken, flatten_subgroups=True):
        async with staged() as stage:
            monkeypatch.setattr(PagePool, "allocate", lambda pool, count: pool.release(range(3)))
            await stage.command(admit("a"))
            await stage.worker.gone.wait()
    assert "pages or the prefix tree" in caplog.text


async def test_malformed_admit_of_a_leader_ends_its_request_alone(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = HeldChoice.__init__

    def fail_of_bad(choice: HeldChoice, admit: Admit, *rest: Any) -> None:
        if admit.request_id == "bad":
            fail()
        begin(choice, admit, *rest)

    monkeypatch.setattr(HeldChoice, "__init__", fail_of_bad)
    await stage.command(admit("a"), admit("bad"), admit("b"))
    await until(lambda: stage.ended("a") and stage.ended("b"))
    assert not stage.worker.gone.is_set()


async def test_a_first_step_after_a_long_rest_is_no_stall() -> None:
    held, clock = HeldRunner(), ShiftedClock()
    async with staged(opener_of(held.around), clock=clock) as stage:
        clock.shift_s = 600.0
        held.go.clear()
        await stage.command(admit("a"))
        await stage.load_is(1)
        assert 0 < stage.load.step_age_s < 60
        held.go.set()
        await until(lambda: stage.ended("a"))


@asynccontextmanager
async def narrow(other: bool, hand_back_s: float) -> AsyncGenerator[Stage]:
    """A worker that runs one request at a time, and maybe another one with room beside it."""
    settings = msgspec.structs.replace(
        QUICK,
        batching=msgspec.structs.replace(QUICK.batching, running_max=1),
        queue=msgspec.structs.replace(QUICK.queue, hand_back_s=hand_back_s),
    )
    async with AsyncExitStack() as stack:
        stage = await stack.enter_async_context(staged(opener_of(SlowRunner), settings=settings))
        if other:
            idle, transport = WorkerFactory(open_hash_engine), MemoryTransport(stage.broker)
            await stack.enter_async_context(
                running(idle, transport, settings=settings, instance="worker-1")
            )
        await until(lambda: len({beat.process for beat in stage.beats if beat.worker}) == 1 + other)
        yield stage
        await stage.close("a", "b")


def opener_of(runner: Callable[[PlanRunner], PlanRunner]) -> Callable[[Settings], Engine]:
    def open_engine(settings: Settings) -> Engine:
        engine = open_hash_engine(settings)
        return Engine(engine.core, runner(engine.runner))

    return open_engine


def given_back(stage: Stage) -> list[str]:
    here = [beat for beat in stage.beats if beat.process == stage.worker.process]
    known = bool(here) and here[-1] is stage.beats[-1] and here[-1].worker is not None
    return [line.request_id for line in stage.held if line.returned] if known else []


@pytest.mark.parametrize("drains", [True, False], ids=["leaving", "too slow"])
async def test_waiting_requests_are_given_back_if_there_is_another_worker(drains: bool) -> None:
    async with narrow(other=True, hand_back_s=60.0 if drains else 0.01) as stage:
        await stage.start(admit("a", 900))
        await stage.command(admit("b"))
        if drains:
            await stage.control(DrainWorker())
        await until(lambda: given_back(stage) == ["b"])
        await until(lambda: stage.ended("a"), 20.0)
        assert len(stage.ids("a")) == 900
        await stage.command(abort("b"))
        await until(lambda: given_back(stage) == [])
        assert {row.request_id for row in stage.rows} == {"a"}


async def test_a_lone_worker_keeps_what_waits() -> None:
    async with narrow(other=False, hand_back_s=0.01) as stage:
        await stage.start(admit("a", 200))
        await stage.command(admit("b"))
        await stage.control(DrainWorker())
        await until(lambda: stage.ended("b"), 20.0)
        assert len(stage.ids("b")) == 5


class ShiftedClock(SystemClock):
    """The system's clock, and what was added to it."""

    shift_s = 0.0

    def now(self) -> float:
        return super().now() + self.shift_s


class SlowRunner:
    """A model whose steps take a while, so that requests wait."""

    def __init__(self, runner: PlanRunner) -> None:
        self._runner = runner
        self._never = threading.Event()

    def run(self, plan: StepPlan, part: Callable[[], SamplingPart] | None = None) -> StepOutcome:
        self._never.wait(0.002)
        return self._runner.run(plan, part)

    def make_drafts(self) -> Ints:
        return self._runner.make_drafts()


class HeldRunner:
    """A runner whose steps begin when the test says so."""

    runner: PlanRunner

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()

    def around(self, runner: PlanRunner) -> HeldRunner:
        self.runner = runner
        return self

    def run(self, plan: StepPlan, part: Callable[[], SamplingPart] | None = None) -> StepOutcome:
        assert self.go.wait(10)
        return self.runner.run(plan, part)

    def make_drafts(self) -> Ints:
        return self.runner.make_drafts()


class WrongStep:
    """Answers for a plan that it was not given, once the warm-up is over."""

    def __init__(self, runner: PlanRunner) -> None:
        self._runner = runner

    def run(self, plan: StepPlan, part: Callable[[], SamplingPart] | None = None) -> StepOutcome:
        outcome = self._runner.run(plan, part)
        return outcome if plan.step <= 2 else msgspec.structs.replace(outcome, step=0)

    def make_drafts(self) -> Ints:
        return self._runner.make_drafts()
