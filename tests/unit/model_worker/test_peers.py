"""What a worker does by the heartbeats of others: leave, if it computes otherwise, or requeue."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
import pytest
from tests.support.memory_bus import MemoryBroker, MemoryTransport
from tests.support.services import running
from tests.support.wait import until
from tests.support.worker import attempt, process
from tests.unit.model_worker.test_service import WorkerFactory, open_hash_engine

from antiphon.model_worker.protocol.peers import (
    NumericsCheck,
    free_slots,
    longest_elsewhere,
    other_workers,
)
from antiphon.model_worker.startup.engine import Engine
from antiphon.service.peers import Liveness, Peer
from antiphon.service.startup import CannotStart
from antiphon.wire.base import Process, ProcessState, Role
from antiphon.wire.heartbeat import Heartbeat, RunningRequest, WorkerLoad
from antiphon.wire.ids import Incarnation, InstanceId, ModelName, RequestId

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.config.settings import Settings

BITS = "isa:avx512,kernels:1,linear:packed"
OTHER_ISA = "isa:avx2,kernels:1,linear:packed"
MODEL = ModelName("m")
LOAD = WorkerLoad(
    pages_free=10,
    pages_total=10,
    page_tokens=16,
    running_max=3,
    step=0,
    step_age_s=0.0,
    context_tokens=128,
)


def beat(bits: str, incarnation: str = "1", **said: object) -> Heartbeat:
    whole: dict[str, object] = {
        "role": Role.WORKER,
        "process": Process(instance=InstanceId("worker-0"), incarnation=Incarnation(incarnation)),
        "state": ProcessState.READY,
        "model": MODEL,
        "config_digest": "",
        "health_port": 0,
        "load": 0,
        "worker": msgspec.structs.replace(LOAD, bits=bits),
        "not_after_unix_ms": 0,
    }
    return Heartbeat(**whole | said)  # pyright: ignore[reportArgumentType]


async def objection(
    ours: str, met: Heartbeat, state: ProcessState = ProcessState.STARTING
) -> str | None:
    """Why a worker of the incarnation 1 gives way to another, if it does."""
    agreement = NumericsCheck(process("worker-1"), MODEL, ours)
    agreement.compare(met, state)
    try:
        async with asyncio.timeout(0):
            await agreement.wait_for_conflict()
    except TimeoutError:
        return None
    except CannotStart as error:
        return str(error)


async def test_a_worker_with_other_numerics_names_the_difference() -> None:
    said = await objection(BITS, beat(OTHER_ISA))
    assert said == "worker-0 computes this model with other numerics: isa"
    said = await objection(BITS, beat("isa:avx2,kernels:2,linear:int8"))
    assert said == "worker-0 computes this model with other numerics: isa, kernels, linear"
    for ours, theirs in ((BITS, ""), ("", BITS)):
        said = await objection(ours, beat(theirs))
        assert said == "worker-0 computes this model with other numerics: model.deterministic"


async def test_equal_workers_other_models_and_draining_ones_are_no_conflict() -> None:
    assert await objection(BITS, beat(BITS)) is None
    assert await objection("", beat("")) is None
    assert await objection(BITS, beat(OTHER_ISA, model=ModelName("other"))) is None
    assert await objection(BITS, beat(OTHER_ISA, state=ProcessState.DRAINING)) is None
    assert await objection(BITS, beat(OTHER_ISA, worker=None)) is None  # it starts itself


async def test_of_two_that_are_ready_one_gives_way() -> None:
    assert await objection(BITS, beat(OTHER_ISA, "0"), ProcessState.READY) is not None
    assert await objection(BITS, beat(OTHER_ISA, "2"), ProcessState.READY) is None


def open_with(bits: str) -> Callable[[Settings], Engine]:
    """An engine that has promised these bits, whatever runs beside a request."""

    class Promising(Engine):
        @property
        def numerics_digest(self) -> str:
            return bits

    def opener(settings: Settings) -> Engine:
        engine = open_hash_engine(settings)
        return Promising(engine.core, engine.runner)

    return opener


async def test_a_worker_does_not_join_one_that_gives_its_model_other_bits() -> None:
    broker = MemoryBroker()
    first, second = WorkerFactory(open_with(OTHER_ISA)), WorkerFactory(open_with(BITS))
    async with running(first, MemoryTransport(broker)) as there:
        transport = MemoryTransport(broker)
        async with running(
            second, transport, instance="worker-1", incarnation="2", ready=False
        ) as here:
            await until(here.gone.is_set)
            match = "worker-0 computes this model with other numerics: isa"
            with pytest.RaisesGroup(
                pytest.RaisesExc(CannotStart, match=match), flatten_subgroups=True
            ):
                await here.ended()
        assert there.health.state is ProcessState.READY


def line(*, ended: bool = False) -> RunningRequest:
    return RunningRequest(request_id=RequestId("r"), attempt=attempt(), tokens=1, ended=ended)


def peer(load: WorkerLoad | None, model: ModelName = MODEL) -> Peer:
    return Peer(beat("", model=model, worker=load), Liveness.ALIVE, 0.0)


def test_only_a_worker_of_our_model_that_runs_steps_counts() -> None:
    paused = msgspec.structs.replace(LOAD, paused=True)
    peers = [peer(LOAD), peer(None), peer(paused), peer(LOAD, ModelName("another"))]
    assert other_workers(peers, MODEL) == [LOAD]


def test_room_is_what_others_could_start_at_once() -> None:
    busy = msgspec.structs.replace(LOAD, running=(line(), line(), line(ended=True)))
    full = msgspec.structs.replace(LOAD, running=(line(),) * 5)
    short = msgspec.structs.replace(LOAD, pages_promised=10)
    assert [free_slots([load]) for load in (LOAD, busy, full, short)] == [3, 1, 0, 0]
    assert free_slots([LOAD, busy, full]) == 4
    assert free_slots([]) == 0


def test_only_what_others_hold_to_the_end_is_theirs() -> None:
    small = msgspec.structs.replace(LOAD, context_tokens=64)
    assert longest_elsewhere([small, LOAD], 128) is None
    assert longest_elsewhere([small], 128) == 64
