"""Where what waits here could be run instead."""

from __future__ import annotations

import msgspec

from antiphon.model_worker.protocol.peers import free_slots, longest_elsewhere, other_workers
from antiphon.service.peers import Liveness, Peer
from antiphon.wire.base import Attempt, Process, ProcessState, Role, Term
from antiphon.wire.heartbeat import Heartbeat, RunningRequest, WorkerLoad
from antiphon.wire.ids import Incarnation, InstanceId, ModelName, RequestId

MODEL = ModelName("model")
OTHER = Process(instance=InstanceId("worker-1"), incarnation=Incarnation("1"))
LOAD = WorkerLoad(
    pages_free=10,
    pages_total=10,
    page_tokens=16,
    running_max=3,
    step=0,
    step_age_s=0.0,
    context_tokens=128,
)


def line(*, ended: bool = False) -> RunningRequest:
    attempt = Attempt(term=Term(number=1, scheduler=OTHER), n=1)
    return RunningRequest(request_id=RequestId("r"), attempt=attempt, tokens=1, ended=ended)


def peer(load: WorkerLoad | None, model: ModelName = MODEL) -> Peer:
    beat = Heartbeat(
        role=Role.WORKER,
        process=OTHER,
        state=ProcessState.READY,
        model=model,
        config_digest="",
        health_port=0,
        load=0,
        worker=load,
        not_after_unix_ms=0,
    )
    return Peer(beat, Liveness.ALIVE, 0.0)


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
