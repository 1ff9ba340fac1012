"""Workers of one model give the same bits, or one of them leaves and says in what they differ."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from tests.support.services import running
from tests.support.wait import until
from tests.unit.model_worker.test_service import WorkerFactory, open_hash_engine, process

from antiphon.bus.memory import MemoryBroker, MemoryTransport
from antiphon.model_worker.protocol.peers import NumericsCheck
from antiphon.model_worker.startup.engine import Engine
from antiphon.service.sockets import CannotStart
from antiphon.wire.base import Process, ProcessState, Role
from antiphon.wire.heartbeat import Heartbeat, WorkerLoad
from antiphon.wire.ids import Incarnation, InstanceId, ModelName

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.config.settings import Settings

BITS = "isa:avx512,kernels:1,linear:packed"
OTHER_ISA = "isa:avx2,kernels:1,linear:packed"
MODEL = ModelName("m")


def beat(bits: str, incarnation: str = "1", **said: object) -> Heartbeat:
    load = WorkerLoad(
        pages_free=1,
        pages_total=1,
        page_tokens=1,
        running_max=1,
        step=0,
        step_age_s=0.0,
        context_tokens=1,
        bits=bits,
    )
    whole: dict[str, object] = {
        "role": Role.WORKER,
        "process": Process(instance=InstanceId("worker-0"), incarnation=Incarnation(incarnation)),
        "state": ProcessState.READY,
        "model": MODEL,
        "config_digest": "",
        "health_port": 0,
        "load": 0,
        "worker": load,
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


async def test_who_differs_is_told_in_what() -> None:
    said = await objection(BITS, beat(OTHER_ISA))
    assert said == "worker-0 computes this model with other numerics: isa"
    said = await objection(BITS, beat("isa:avx2,kernels:2,linear:int8"))
    assert said == "worker-0 computes this model with other numerics: isa, kernels, linear"
    for ours, theirs in ((BITS, ""), ("", BITS)):
        said = await objection(ours, beat(theirs))
        assert said == "worker-0 computes this model with other numerics: model.deterministic"


async def test_nobody_gives_way_to_its_like_to_other_models_or_to_who_leaves() -> None:
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
