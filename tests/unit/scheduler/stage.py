"""A leader among peers that report what a test sets, on a clock that the test moves."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from tests.support.clock import ManualClock

from antiphon.scheduler.core import SchedulerCore
from antiphon.scheduler.leader_config import LeaderConfig
from antiphon.scheduler.outbox import Action, RequestBound, SealCall
from antiphon.service.peers import LivenessConfig, PeerTable
from antiphon.wire.base import Attempt, Process, ProcessState, Role, Term
from antiphon.wire.codec import pack_ids
from antiphon.wire.command import Abort, Admit, ChoiceOutput, Command, CommandBatch, Rebind
from antiphon.wire.digests import block_digests
from antiphon.wire.heartbeat import Heartbeat, RunningRequest, WorkerLoad
from antiphon.wire.ids import Incarnation, InstanceId, ModelName, RequestId, TenantId
from antiphon.wire.kv_events import BlocksStored, KvEvents
from antiphon.wire.sampling import SamplingParams
from antiphon.wire.seal import AttemptsSealed, SealedRequest, SealRequest
from antiphon.wire.submit import (
    CancelRequest,
    LostRequest,
    NoticeBatch,
    OpenList,
    OpenRequest,
    SubmitRequest,
)

MODEL = ModelName("model")
T = TypeVar("T")
BEAT_S = 0.5
TICK_S = 0.1


def process(instance: str, life: int = 1) -> Process:
    return Process(instance=InstanceId(instance), incarnation=Incarnation(f"life-{life}"))


ME = process("scheduler-0")
GATEWAY = process("gateway-0")
WORKER_LOAD = WorkerLoad(
    pages_free=100,
    pages_total=100,
    page_tokens=16,
    running_max=2,
    step=0,
    step_age_s=0.0,
    context_tokens=2048,
    kv_seq=0,
)


def submit_request(
    name: str, owner: Process, deadline_unix_ms: int, model: ModelName = MODEL, **fields: Any
) -> SubmitRequest:
    request = SubmitRequest(
        request_id=RequestId(name),
        owner=owner,
        tenant=TenantId("default"),
        model=model,
        digest=name.encode(),
        prompt_ids=pack_ids(range(8)),
        sampling=SamplingParams(max_new_tokens=10),
        deadline_unix_ms=deadline_unix_ms,
    )
    return msgspec.structs.replace(request, **fields)


def cancel_request(request: SubmitRequest) -> CancelRequest:
    return CancelRequest(
        request_id=request.request_id,
        owner=request.owner,
        deadline_unix_ms=request.deadline_unix_ms,
    )


def open_entry(request: SubmitRequest, attempt: Attempt | None = None) -> OpenRequest:
    """How a gateway's open list names a request."""
    return OpenRequest(
        request_id=request.request_id, deadline_unix_ms=request.deadline_unix_ms, attempt=attempt
    )


class Actor:
    """A peer: beats by itself while the stage's time passes, until it is silenced."""

    def __init__(self, stage: Stage, role: Role, who: Process) -> None:
        self.role = role
        self.process = who
        self.state = ProcessState.READY
        self.silent = False
        self.deaf = False  # answers no calls
        self.answers_max = 64  # so many seals, as a detokenizer, fit into one answer
        self.loading = False
        self.leads: Term | None = None
        self.reads: tuple[str, ...] = ()
        self.load = WORKER_LOAD
        self.open: dict[RequestId, OpenRequest] = {}
        self.outputs: dict[RequestId, SealedRequest] = {}  # of a detokenizer
        self._version = 0
        self._stage = stage

    def runs(self, *held: RunningRequest) -> None:
        self.set_load(running=held)

    def reports(self, *held: RunningRequest) -> None:
        """Hold exactly these, and report it at once."""
        self.runs(*held)
        self.beat()
        self._stage.listen()

    def set_load(self, **fields: object) -> None:
        self.load = msgspec.structs.replace(self.load, **fields)

    def claim(self, number: int) -> None:
        """Lead, as a scheduler, from now on."""
        self.leads = Term(number=number, scheduler=self.process)
        self.beat()

    def beat(self) -> None:
        self._stage.peers.on_heartbeat(
            Heartbeat(
                role=self.role,
                process=self.process,
                state=self.state,
                model=None if self.role is Role.GATEWAY else MODEL,
                config_digest="digest",
                health_port=0,
                load=0,
                worker=self.load if self.role is Role.WORKER and not self.loading else None,
                leads=self.leads,
                reads=self.reads,
                sent_unix_ms=self._stage.clock.unix_ms(),
                not_after_unix_ms=self._stage.clock.unix_ms() + 1000,
            )
        )
        if self.role is Role.GATEWAY:
            self.list(whole=True)

    def list(self, *, whole: bool, closed: tuple[RequestId, ...] = (), version: int = 0) -> None:
        self._version += 1
        self._stage.leader.on_open_list(
            OpenList(
                model=MODEL,
                owner=self.process,
                version=version or self._version,
                whole=whole,
                opened=tuple(self.open.values()),
                closed=closed,
                not_after_unix_ms=self._stage.clock.unix_ms() + 1000,
            )
        )

    def follows(self, request_id: RequestId, attempt: Attempt) -> None:
        """Show text of an attempt, and list it at once."""
        line = self.open[request_id]
        self.open[request_id] = msgspec.structs.replace(line, attempt=attempt)
        self.list(whole=False)

    def accepted(self, admit: Admit, *outputs: list[int], **fields: Any) -> None:
        """Hold these outputs of an attempt, as a detokenizer."""
        choices = tuple(
            ChoiceOutput(choice=index, output_ids=pack_ids(ids))
            for index, ids in enumerate(outputs)
        )
        earlier = () if admit.continues is None else (*admit.lineage, admit.continues)
        sealed = SealedRequest(
            request_id=admit.request_id, attempt=admit.attempt, lineage=earlier, choices=choices
        )
        self.outputs[admit.request_id] = msgspec.structs.replace(sealed, **fields)

    def closes(self, request_id: str) -> None:
        del self.open[RequestId(request_id)]
        self.list(whole=False, closed=(RequestId(request_id),))
        self._stage.listen()


class Stage:
    """The leader under test, its peers, and its actions since `actions` was last cleared."""

    def __init__(self, rules: LeaderConfig | None = None, clock: ManualClock | None = None) -> None:
        self.clock = clock or ManualClock()
        patience = LivenessConfig(heartbeat_s=BEAT_S, suspect_beats=3, dead_beats=5, owner_s=15.0)
        self.peers = PeerTable(ME, "digest", self.clock, patience)
        self.leader = SchedulerCore(ME, MODEL, rules or LeaderConfig(), self.clock, self.peers)
        self.actions: list[Action] = []
        self.actors: list[Actor] = []
        self.link_up = True
        self.reachable = True  # messages come, as well as go
        self._echo = Actor(self, Role.SCHEDULER, ME)

    def enter(self, role: Role, instance: str, life: int = 1) -> Actor:
        actor = Actor(self, role, process(instance, life))
        self.actors.append(actor)
        actor.beat()
        return actor

    def usual(self) -> tuple[Actor, Actor, Actor]:
        """A gateway, a worker and a detokenizer, and a leader that binds."""
        actors = (
            self.enter(Role.GATEWAY, "gateway-0"),
            self.enter(Role.WORKER, "worker-0"),
            self.enter(Role.DETOKENIZER, "detokenizer-0"),
        )
        self.pass_s(3.0)
        assert self.leader.term is not None
        return actors

    def pass_s(self, seconds: float) -> None:
        """Let time pass, with heartbeats and ticks in it."""
        for _ in range(round(seconds / TICK_S)):
            self.clock.advance(TICK_S)
            if self.link_up and round(self.clock.now() / TICK_S) % round(BEAT_S / TICK_S) == 0:
                for actor in [self._echo, *self.actors]:
                    if self.reachable and not actor.silent:
                        actor.beat()
            self.peers.update_liveness(link_up=self.link_up, connect_count=1)
            self.leader.tick(link_up=self.link_up, joins=1)
            self.listen()

    def listen(self) -> None:
        """Take the leader's actions, and answer its calls."""
        while actions := self.leader.take_actions():
            self.actions += actions
            for action in actions:
                if isinstance(action, SealCall):
                    self._seal(action)

    def _seal(self, call: SealCall) -> None:
        for actor in self.actors:
            if actor.process.instance == call.detokenizer and not (actor.silent or actor.deaf):
                asked = (one.request_id for one in call.message.requests)
                unknown = ((each, SealedRequest(request_id=each)) for each in asked)
                requests = tuple(actor.outputs.get(each, empty) for each, empty in unknown)
                requests = requests[: actor.answers_max]
                answer = AttemptsSealed(detokenizer=actor.process, requests=requests)
                self.leader.on_sealed(call, answer)

    def submit(
        self, name: str, gateway: Process = GATEWAY, deadline_s: float = 60.0, **fields: Any
    ) -> SubmitRequest:
        """Submit a request, and have its gateway list it."""
        request = self.request(name, gateway, deadline_s, **fields)
        for actor in self.actors:
            if actor.process == gateway:
                actor.open[request.request_id] = open_entry(request, request.attempt_floor)
        self.leader.submit(request)
        self.listen()
        return request

    def submit_all(self, count: int, name: str = "r", **fields: Any) -> None:
        for number in range(count):
            self.submit(f"{name}{number}", **fields)

    def submit_prompt(self, name: str, prompt_ids: bytes, **fields: Any) -> None:
        """Submit a prompt with the digests of its blocks."""
        digests = block_digests(b"root", prompt_ids)
        self.submit(name, prompt_ids=prompt_ids, block_digests=digests, **fields)

    def store(self, worker: Actor, *chains: bytes) -> None:
        """Announce the blocks of these digests, as first events of a worker's prefix cache."""
        events = tuple(BlocksStored(parent=b"root", digests=chain) for chain in chains)
        message = KvEvents(worker=worker.process, seq=len(events), events=events)
        self.leader.caches.apply_events(message)

    def request(
        self, name: str, gateway: Process = GATEWAY, deadline_s: float = 60.0, **fields: Any
    ) -> SubmitRequest:
        due_ms = self.clock.unix_ms() + round(deadline_s * 1000)
        return submit_request(name, gateway, due_ms, **fields)

    def cancel(self, request: SubmitRequest) -> None:
        self.leader.cancel(cancel_request(request))
        self.listen()

    def first(self, role: Role) -> Actor:
        return next(actor for actor in self.actors if actor.role is role)

    def commands(self, worker: Actor | None = None) -> list[Command]:
        return [
            command
            for batch in self.batches()
            if worker is None or batch.worker == worker.process
            for command in batch.commands
        ]

    def admits(self, worker: Actor | None = None) -> list[Admit]:
        return [command for command in self.commands(worker) if isinstance(command, Admit)]

    def aborts(self, worker: Actor | None = None) -> list[Abort]:
        return [command for command in self.commands(worker) if isinstance(command, Abort)]

    def rebinds(self) -> list[Rebind]:
        return [command for command in self.commands() if isinstance(command, Rebind)]

    def lost(self) -> list[LostRequest]:
        return [lost for batch in self.of(NoticeBatch) for lost in batch.requests]

    def asked(self) -> list[RequestId]:
        return [request_id for batch in self.of(NoticeBatch) for request_id in batch.lacking]

    def owner_seals(self) -> list[SealRequest]:
        return [seal for batch in self.of(NoticeBatch) for seal in batch.seals]

    def batches(self) -> list[CommandBatch]:
        return self.of(CommandBatch)

    def bound(self) -> list[RequestBound]:
        return self.of(RequestBound)

    def of(self, kind: type[T]) -> list[T]:
        return [action for action in self.actions if isinstance(action, kind)]


def full(rules: LeaderConfig, waiting: int = 0, report_s: float = 0.6) -> tuple[Stage, Actor]:
    """A worker that runs the three requests that it was given, and more that wait for it."""
    stage, _, worker, _ = usual(rules)
    stage.submit_all(3 + waiting, "low-", priority=0)
    assert len(stage.admits()) == 3
    worker.runs(*map(running, stage.admits()))
    stage.pass_s(report_s)
    stage.actions.clear()
    return stage, worker


def usual(rules: LeaderConfig | None = None) -> tuple[Stage, Actor, Actor, Actor]:
    stage = Stage(rules)
    return stage, *stage.usual()


def held(request_id: RequestId, attempt: Attempt, **fields: Any) -> RunningRequest:
    """What a worker's heartbeat reports of a request that has its first token."""
    return RunningRequest(**{"request_id": request_id, "attempt": attempt, "tokens": 1} | fields)


def running(admit: Admit, *, ended: bool = False) -> RunningRequest:
    return held(admit.request_id, admit.attempt, ended=ended)


def sent_to(detokenizer: Process, request_id: RequestId, attempt: Attempt) -> RunningRequest:
    """A running request whose worker names its detokenizer."""
    return held(
        request_id,
        attempt,
        detokenizer=detokenizer.instance,
        detokenizer_incarnation=detokenizer.incarnation,
    )


def waiting(admit: Admit) -> RunningRequest:
    return held(admit.request_id, admit.attempt, tokens=0, waiting=True)


def returned(admit: Admit) -> RunningRequest:
    return msgspec.structs.replace(waiting(admit), ended=True, returned=True)


def other_attempt(number: int, n: int = 1, scheduler: str = "scheduler-1") -> Attempt:
    return Attempt(term=Term(number=number, scheduler=process(scheduler)), n=n)
