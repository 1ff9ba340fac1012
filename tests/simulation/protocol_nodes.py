"""The processes of a simulated cluster: the real state machines, wired as their services do it."""

from __future__ import annotations

import hashlib
import math
import random
from contextlib import ExitStack
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import msgspec
from tests.simulation.owner_world import medium
from tests.simulation.protocol_engine import WorkerEngine

from antiphon.bus.transport import BusDown, NoResponders
from antiphon.config.gateway import GatewayConfig
from antiphon.detokenizer.machine import READS, Action, Detokenizer, SendStop
from antiphon.gateway.owner.actions import Action as OwnerAction
from antiphon.gateway.owner.actions import Deliver, Ended, StreamEvent, TextDelta
from antiphon.gateway.owner.machine import Owner
from antiphon.model_worker.protocol.peers import LIST_READERS
from antiphon.model_worker.protocol.worker_output import Action as WorkerAction
from antiphon.model_worker.protocol.worker_output import (
    DropPrompt,
    FetchPrompt,
    RunChoice,
    WorkerOutput,
)
from antiphon.scheduler.core import SchedulerCore
from antiphon.scheduler.leader_config import LeaderConfig
from antiphon.scheduler.outbox import SealCall
from antiphon.service.followed_lists import OPEN_LIST_READS, RUNNING_LIST_READS
from antiphon.service.peers import LivenessConfig, Peer, PeerChange, PeerTable
from antiphon.service.priority import PriorityPolicy
from antiphon.service.sequence import SeqSender
from antiphon.service.service import Report
from antiphon.transfer.blobs import BlobGone
from antiphon.wire.base import Attempt, Message, Process, ProcessState, Role
from antiphon.wire.claim import Claim, PromptClaim
from antiphon.wire.codec import unpack_ids
from antiphon.wire.command import (
    CommandBatch,
    ContinueWorker,
    PauseMode,
    PauseWorker,
    ResendTokens,
    StopChoice,
)
from antiphon.wire.errors import (
    DeadlineExceeded,
    EngineError,
    GatewayLost,
    Unavailable,
    WrongTerm,
)
from antiphon.wire.heartbeat import (
    ClaimName,
    FetchRunningList,
    Heartbeat,
    NameTaken,
    RunningList,
    StreamSeq,
    WorkerLoad,
)
from antiphon.wire.ids import Incarnation, InstanceId, ModelName, RequestId
from antiphon.wire.routes import (
    ADOPT,
    CANCEL,
    COMMAND,
    DETOKENIZER_CONTROL,
    EXIT,
    HEARTBEAT,
    HEARTBEAT_SOURCES,
    NAME,
    NOTICE,
    OPEN,
    OPEN_FETCH,
    RUNNING,
    RUNNING_FETCH,
    STOP,
    SUBMIT,
    TEXT,
    TOKENS,
)
from antiphon.wire.seal import AttemptsSealed, SealAttempts
from antiphon.wire.submit import (
    AdoptRequest,
    CancelAccepted,
    CancelRequest,
    FetchOpenList,
    NoticeBatch,
    OpenList,
    OpenListState,
    RequestAdopted,
    SubmitAccepted,
    SubmitRequest,
    claimed_submit,
)
from antiphon.wire.text import ResumeText, TextBatch, TextResumed
from antiphon.wire.tokens import TokenBatch, TokenNews

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tests.simulation.protocol_network import Interest, Network, Timeline

    from antiphon.model_worker.batching.loop import StepReport
    from antiphon.model_worker.batching.state import ChoiceKey, RequestState
    from antiphon.service.clock import Clock
    from antiphon.wire.media import Medium

MODEL = ModelName("model")
BEAT_S = 0.5
TICKS_A_BEAT = 5
TIMER_MIN_S = 0.001
STEP_S = 0.025
REPORT_S = 0.001
"""Until the thread of the events goes on with what that of the loop has reported."""
RUNNING_MAX = 4
ADOPT_S = 5.0
"""How long a gateway looks for a leader that knows a stream."""
PRECEDENCE = PriorityPolicy(priority=True, preempt_threshold=4, max_overtake_s=2.0)
LEADER_READS = (*OPEN_LIST_READS, *RUNNING_LIST_READS, PromptClaim.__name__)
LONG_PROMPT_BYTES = 80
"""Longer prompts stay at their gateways, and workers fetch them."""
FETCH_RETRY_S = 0.2
FETCH_GIVEN_UP_S = 20.0
RENEWED_S = 2.0
"""How long a gateway that adopts a request takes for its medium, at most."""
HANDOVER_S = 5.0
"""How long the one before holds it from then on."""
MESSAGE_BYTES_MAX = 1000 * 1024


class HostClock:
    """The time of one host, whose wall clock is so far ahead of the world's."""

    def __init__(self, clock: Clock, ahead_ms: int) -> None:
        self._clock = clock
        self._ahead_ms = ahead_ms

    def now(self) -> float:
        return self._clock.now()

    def unix_ms(self) -> int:
        return self._clock.unix_ms() + self._ahead_ms


class Node:
    """One life of one process. It may be frozen for a while, and it may die.

    Attributes:
        replaced: Called with the live process to which it has lost its name, when it exits.
    """

    role: Role

    def __init__(self, timeline: Timeline, network: Network, instance: str, life: int) -> None:
        self.process = Process(
            instance=InstanceId(instance), incarnation=Incarnation(f"life-{life}")
        )
        self.name = f"{instance}#{life}"
        self.timeline = timeline
        self.clock = HostClock(timeline.clock, network.ahead_ms(instance))
        self.network = network
        self.alive = True
        self.mute_until = 0.0
        self.deaf_until = 0.0
        self.connected = True
        self.reconnects = 0
        self.state = ProcessState.READY
        self.thawed_ms = 0
        self.replaced: Callable[[Node], None] = lambda _: None
        self.frozen_until = 0.0
        patience = LivenessConfig(heartbeat_s=BEAT_S, suspect_beats=3, dead_beats=5, owner_s=15.0)
        self.peers = PeerTable(self.process, "digest", self.clock, patience)
        network.parties.append(self)
        for role in HEARTBEAT_SOURCES[self.role]:
            network.listen(self, HEARTBEAT, self._receive, role=role)
        if self.role not in HEARTBEAT_SOURCES[self.role]:
            network.listen(self, HEARTBEAT, self._receive, role=self.role, instance=instance)
        network.listen(self, EXIT, lambda message: self.peers.on_exit(message.process))
        network.listen(self, NAME, lambda _: NameTaken(process=self.process), instance=instance)

    def start(self) -> None:
        self.every(BEAT_S, self.beat)
        self.timeline.after(0.0, partial(self.run, self._judge))

    def run(self, act: Callable[[], object]) -> None:
        if not self.alive:
            return
        if self.frozen_until and self.clock.now() < self.frozen_until:
            self.timeline.at(self.frozen_until, lambda: self.run(act))
        else:
            act()

    def every(self, seconds: float, act: Callable[[], None]) -> None:
        def again() -> None:
            act()
            self.timeline.after(seconds, partial(self.run, again))

        self.timeline.after(0.0, partial(self.run, again))

    def freeze(self, seconds: float) -> None:
        self.frozen_until = max(self.frozen_until, self.clock.now() + seconds)
        left_s = self.frozen_until - self.clock.now()
        self.thawed_ms = self.clock.unix_ms() + round(left_s * 1000)

    @property
    def link_up(self) -> bool:
        return self.network.up and self.connected

    @property
    def joins(self) -> int:
        return self.network.joins + self.reconnects

    def disconnect(self, seconds: float) -> None:
        """Lose the connection to the broker, and connect again some time later."""
        self.connected = False

        def reconnect() -> None:
            self.connected = True
            self.reconnects += 1
            self.beat()

        self.timeline.after(seconds, lambda: self.run(reconnect))

    @property
    def answers(self) -> bool:
        """Whether a call to it is answered now."""
        silent_until = max(self.frozen_until, self.mute_until, self.deaf_until)
        return self.alive and self.clock.now() >= silent_until

    def die(self) -> None:
        self.alive = False
        self.network.leave(self)

    def beat(self, process: Process | None = None) -> None:
        """Send a heartbeat; a forged one if it is another's."""
        report = self.report()
        heartbeat = self.heartbeat(process, report)
        for changes in report.changes:
            self.say(RUNNING, changes, model=MODEL, worker=self.process.instance)
        self.say(HEARTBEAT, heartbeat, role=self.role, instance=self.process.instance)

    def heartbeat(self, process: Process | None = None, report: Report | None = None) -> Heartbeat:
        report = report or self.report()
        return Heartbeat(
            role=self.role,
            process=process or self.process,
            state=self.state,
            model=None if self.role is Role.GATEWAY else MODEL,
            config_digest="digest",
            health_port=0,
            load=report.load,
            worker=report.worker,
            leads=report.leads,
            streams=report.streams,
            reads=report.reads,
            sent_unix_ms=self.clock.unix_ms(),
            not_after_unix_ms=self.clock.unix_ms() + 2_500,
            unechoed_ms=self.peers.count_sent(self.joins),
        )

    def say(self, route: object, message: Message, **part: str) -> None:
        try:
            self.network.publish(self, route, message, **part)  # pyright: ignore[reportArgumentType]
        except BusDown:
            return

    def report(self) -> Report:
        raise NotImplementedError

    def _receive(self, beat: Heartbeat) -> None:
        self.peers.on_heartbeat(beat)
        rival = self.peers.take_name_conflict()
        for one in self.network.parties:
            if isinstance(one, Node) and one.process == rival:
                self.die()  # it has asked, and another one has its name
                self.replaced(one)
                break

    def _judge(self) -> None:
        due_s = self.peers.update_liveness(link_up=self.link_up, connect_count=self.joins)
        for peer in self.peers.take_late():
            self._probe(peer)
        self.timeline.after(due_s, partial(self.run, self._judge))

    def _probe(self, late: Peer) -> None:
        def answer(reply: NameTaken | EngineError) -> None:
            if isinstance(reply, NameTaken | NoResponders):
                holder = reply.process if isinstance(reply, NameTaken) else None
                self.peers.on_probed(late, holder)

        name = late.process.instance
        self.network.call(self, NAME, ClaimName(process=self.process), answer, instance=name)


class GatewayNode(Node):
    """Owns requests. What its clients receive goes to `deliver`."""

    role = Role.GATEWAY

    def __init__(
        self,
        timeline: Timeline,
        network: Network,
        instance: str,
        life: int,
        deliver: Callable[[GatewayNode, RequestId, StreamEvent], None],
    ) -> None:
        super().__init__(timeline, network, instance, life)
        self.owner = Owner(
            self.process,
            MODEL,
            self.clock,
            GatewayConfig(),
            states_read=lambda: self.peers.read_by_all(OpenListState, *OPEN.listeners),
        )
        self._deliver = deliver
        self._wakes_at = -math.inf  # it sets no timer before it starts
        self.prompts: dict[str, bytes] = {}
        self.media: dict[RequestId, str] = {}  # the token of each, of one medium a request
        self.leaving: set[str] = set()  # tokens of those that go on elsewhere
        self._tokens = count(1)
        self._random = random.Random(f"media {self.name}")
        self.peers.watch(self._watch)
        network.listen(self, TEXT, self._on_text, gateway=instance)
        network.listen(self, NOTICE, self._on_notice, gateway=instance)
        network.listen(self, OPEN_FETCH, self._on_open_fetch, gateway=instance)

    def start(self) -> None:
        super().start()
        self._wakes_at = math.inf
        self._act(self.owner.tick())

    def open(self, submit: SubmitRequest) -> None:
        self.run(lambda: self._act(self.owner.open(submit)))

    def leave(self, request_id: RequestId) -> None:
        self.run(lambda: self._act(self.owner.cancel(request_id)))

    def detach(self, request_id: RequestId) -> None:
        self.run(lambda: self._act(self.owner.detach(request_id)))

    def resume(
        self,
        submit: SubmitRequest,
        client_has: Sequence[tuple[int, int | None]],
        opened: Callable[[], None],
        refused: Callable[[EngineError], None],
    ) -> None:
        """Deliver a request from its beginning to a client, as `Submission.resume` does.

        `opened` is called before the first of its events.
        """
        request_id = submit.request_id
        until = self.clock.now() + ADOPT_S
        message = AdoptRequest(
            request_id=request_id, tenant=submit.tenant, owner=self.process, fingerprint=b""
        )
        adopting = ExitStack()

        def ask() -> None:
            self.network.call(self, ADOPT, message, answer, model=MODEL)

        def begin() -> None:
            adopting.enter_context(self.owner.adopting(request_id))
            ask()

        def answer(reply: RequestAdopted | EngineError) -> None:
            retryable = isinstance(reply, Unavailable | WrongTerm | DeadlineExceeded)
            if retryable and self.clock.now() < until:
                self.timeline.after(0.1, lambda: self.run(ask))
                return
            adopting.close()
            if not isinstance(reply, RequestAdopted):
                refused(reply)
            elif reply.changed or self.owner.find(request_id) is None:
                opened()
                self._hand_over(request_id)
                self._act(self.owner.adopt(reply, client_has))
                self._renew(reply.submit)
            else:
                opened()
                self._act(self.owner.rewind(request_id))

        self.run(begin)

    def report(self) -> Report:
        return Report(load=self.owner.open_count, reads=RUNNING_LIST_READS)

    def send_prompt(self, claim: Claim) -> bytes | None:
        """What a worker gets that fetches a prompt; None if it is here no longer."""
        return self.prompts.get(claim.token)

    def hold(self, request_id: RequestId) -> Medium:
        """Own a medium of a request from now on."""
        token = self.media[request_id] = f"{request_id} {next(self._tokens)}"
        return medium(self.name, token)

    def has_medium(self, claim: Claim) -> bool:
        return claim.token in self.leaving or claim.token in self.media.values()

    def _renew(self, submit: SubmitRequest) -> None:
        """Have the medium of an adopted request some time later, as `RenewedMedia` does."""

        def renew() -> None:
            request = self.owner._requests.get(submit.request_id)
            if request is None or request.ended or submit.request_id in self.media:
                return
            media = (self.hold(submit.request_id),)
            self._act(self.owner.renew_media(submit.request_id, media))

        if submit.media:
            pause_s = self._random.uniform(0, RENEWED_S)
            self.timeline.after(pause_s, lambda: self.run(renew))

    def _hand_over(self, request_id: RequestId) -> None:
        if (token := self.media.pop(request_id, None)) is not None:
            self.leaving.add(token)
            self.timeline.after(HANDOVER_S, lambda: self.leaving.discard(token))

    def _on_text(self, batch: TextBatch) -> None:
        self._act(self.owner.text_arrived(batch))

    def _on_open_fetch(self, message: FetchOpenList) -> None:
        self._act(self.owner.open_list_requested(message))

    def _on_notice(self, batch: NoticeBatch) -> None:
        offset_ms = self.peers.offset_ms(batch.leader.scheduler)
        if offset_ms is not None:
            self._act(self.owner.notice_arrived(batch, offset_ms))

    def _watch(self, change: PeerChange, peer: Peer) -> None:
        beat = peer.heartbeat
        if beat.role is Role.DETOKENIZER:
            if change is PeerChange.DIED:
                self._act(self.owner.detokenizer_died(peer.process))
            else:
                self._act(self.owner.detokenizer_heartbeat(peer.process, beat.streams))
        elif beat.role is Role.SCHEDULER:
            self._act(self.owner.leader_changed(self.peers.leading(MODEL)))

    def _act(self, actions: Iterable[OwnerAction]) -> None:
        for action in actions:
            match action:
                case Deliver(request_id, event):
                    if isinstance(event, Ended):
                        if isinstance(event.error, GatewayLost):
                            self._hand_over(request_id)
                        self.media.pop(request_id, None)
                        self.prompts.pop(request_id, None)
                    self._deliver(self, request_id, event)
                    if isinstance(event, TextDelta):
                        self.owner.mark_consumed(request_id, event.size_bytes)
                case OpenList() | OpenListState():
                    self.say(OPEN, action, model=MODEL)
                case SubmitRequest():
                    self._submit(action)
                case CancelRequest():
                    self._cancel(action)
                case ResumeText():
                    self._ask(action)
        self._set_timer()

    def _submit(self, message: SubmitRequest) -> None:
        def answer(reply: SubmitAccepted | EngineError) -> None:
            self._act(self.owner.submit_answered(message.request_id, reply))

        self.network.call(self, SUBMIT, self._with_claim(message), answer, model=MODEL)

    def _with_claim(self, message: SubmitRequest) -> SubmitRequest:
        """Prompts of more than a few ids stay here, if all receivers can fetch them."""
        large = len(message.prompt_ids) > LONG_PROMPT_BYTES and message.resume is None
        if not large or not self.peers.read_by_all(PromptClaim, Role.SCHEDULER, Role.WORKER):
            return message
        self.prompts[message.request_id] = message.prompt_ids
        claim = Claim(
            address=self.name,
            token=message.request_id,
            size_bytes=len(message.prompt_ids),
            digest=hashlib.sha256(message.prompt_ids).digest(),
            expires_unix_ms=0,
        )
        return claimed_submit(message, PromptClaim(claim=claim))

    def _cancel(self, message: CancelRequest) -> None:
        def answer(reply: CancelAccepted | EngineError) -> None:
            accepted = isinstance(reply, CancelAccepted)
            self._act(self.owner.cancel_answered(message.request_id, accepted=accepted))

        self.network.call(self, CANCEL, message, answer, model=MODEL)

    def _ask(self, message: ResumeText) -> None:
        def answer(reply: TextResumed | EngineError) -> None:
            answered = isinstance(reply, TextResumed)
            self._act(self.owner.text_answered(message.detokenizer, answered=answered))

        to = message.detokenizer.instance
        self.network.call(self, DETOKENIZER_CONTROL, message, answer, detokenizer=to)

    def _set_timer(self) -> None:
        """Wake up when the owner has something to do, as `OwnerDriver` does."""
        at = max(self.owner.wake_at(), self.clock.now() + TIMER_MIN_S)
        if at < self._wakes_at:
            self._wakes_at = at
            self.timeline.at(at, partial(self.run, partial(self._wake, at)))

    def _wake(self, at: float) -> None:
        if at == self._wakes_at:  # else an earlier timer has taken its place
            self._wakes_at = math.inf
            self._act(self.owner.tick())


NAMED_MAX_S = 0.1
"""How much later a term is named than calls are taken."""


class SchedulerNode(Node):
    """Leads, or stands by."""

    role = Role.SCHEDULER

    def __init__(
        self,
        timeline: Timeline,
        network: Network,
        instance: str,
        life: int,
        queue_max: int,
        message_bytes_max: int,
        running_max: int,
    ) -> None:
        super().__init__(timeline, network, instance, life)
        rules = LeaderConfig(
            beat_s=BEAT_S,
            queue_max=queue_max,
            waiting_max=running_max,
            precedence=PRECEDENCE,
            payload_bytes_max=message_bytes_max,
        )
        self.leader = SchedulerCore(self.process, MODEL, rules, self.clock, self.peers)
        self._doors: list[Interest] = []
        self._said = self.leader.term
        self._chance = random.Random(self.name)
        # Some are of an earlier version, which reads no changes of running lists.
        self.follows = random.Random(self.name).random() < 0.8
        network.listen(self, OPEN, self._on_open, model=MODEL)
        if self.follows:
            network.listen(self, RUNNING, self._on_running, model=MODEL)

    def start(self) -> None:
        super().start()
        self.every(BEAT_S / TICKS_A_BEAT, self._tick)

    def report(self) -> Report:
        return Report(
            load=self.leader.open_requests,
            leads=self.leader.term if self.leader.term == self._said else None,
            reads=LEADER_READS if self.follows else OPEN_LIST_READS,
        )

    def _receive(self, beat: Heartbeat) -> None:
        if not self.follows and beat.worker is not None:
            beat = msgspec.structs.replace(
                beat, worker=msgspec.structs.replace(beat.worker, listed=None)
            )
        super()._receive(beat)

    def _on_running(self, message: RunningList) -> None:
        self.leader.on_running_list(message)
        self._flush()

    def _on_call(self, request: SubmitRequest | CancelRequest | AdoptRequest) -> Message:
        try:
            match request:
                case SubmitRequest():
                    return self.leader.submit(request)
                case CancelRequest():
                    return self.leader.cancel(request)
                case AdoptRequest():
                    return self.leader.adopt(request)
        finally:
            self._flush()

    def _on_open(self, message: OpenList | OpenListState) -> None:
        self.leader.on_open_list(message)
        self._flush()

    def _tick(self) -> None:
        self.leader.tick(link_up=self.link_up, joins=self.joins)
        self._mind_doors()
        self._flush()

    def _mind_doors(self) -> None:
        """Take calls while it leads, and name the term only after that, as the service does."""
        if self.leader.term is None:
            for door in self._doors:
                self.network.ignore(door)
            self._doors = []
        elif not self._doors:
            self._doors = [
                self.network.listen(self, route, self._on_call, model=MODEL)
                for route in (SUBMIT, CANCEL, ADOPT)
            ]
        if self.leader.term != self._said:
            self._said = self.leader.term
            pause_s = self._chance.uniform(0, NAMED_MAX_S)
            self.timeline.after(pause_s, partial(self.run, self.beat))

    def _flush(self) -> None:
        for action in self.leader.take_actions():
            match action:
                case CommandBatch():
                    self.say(COMMAND, action, worker=action.worker.instance)
                case FetchOpenList(gateway=gateway):
                    self.say(OPEN_FETCH, action, gateway=gateway.instance)
                case FetchRunningList(worker=worker):
                    self.say(RUNNING_FETCH, action, worker=worker.instance)
                case NoticeBatch():
                    self.say(NOTICE, action, gateway=action.gateway.instance)
                case SealCall():
                    self._seal(action)
                case _:
                    pass

    def _seal(self, call: SealCall) -> None:
        def answer(reply: AttemptsSealed | EngineError) -> None:
            if isinstance(reply, AttemptsSealed):
                self.leader.on_sealed(call, reply)
                self._flush()

        to = call.detokenizer
        self.network.call(self, DETOKENIZER_CONTROL, call.message, answer, detokenizer=to)


class WorkerNode(Node):
    """Runs the production batching loop, which generates the true answers, one byte a token.

    What it has not begun it gives back: all of it while it drains, and else as often as it likes.

    Attributes:
        fickle: How likely it gives back what waits, at each of its ticks.
        begun: Called with each choice of a request that it begins to run.
        awake: Whether the loop has mail or work, or outputs are unsent.
        left: Called when it has drained.
    """

    role = Role.WORKER

    def __init__(
        self,
        timeline: Timeline,
        network: Network,
        instance: str,
        life: int,
        answer: Callable[[bytes, int, bytes], bytes],
        begun: Callable[[RequestId, int], None],
        fickle: float,
        running_max: int,
        gateway: Callable[[str], GatewayNode | None],
    ) -> None:
        super().__init__(timeline, network, instance, life)
        self.running_max = running_max
        self.seqs = SeqSender()
        self.output = WorkerOutput(
            self.process,
            self.seqs,
            live_max=2 * self.running_max,
            our_time_ms=self.peers.to_local_ms,
            leading=lambda: self.peers.leading(MODEL),
            list_part_max=3,
        )
        self.engine = WorkerEngine(f"{network.seed} {self.name}", self.clock.now, running_max)
        self.fickle = fickle
        self.begun = begun
        self.left: Callable[[], None] | None = None
        self.hands_back = False
        self._pauses = 0
        self._paused = False
        self.awake = False
        self._states: dict[ChoiceKey, RequestState] = {}
        self.fetching: set[tuple[RequestId, Attempt]] = set()
        self.loading: set[ChoiceKey] = set()  # their media are fetched
        self._media_random = random.Random(f"media {self.name}")
        self._gateway = gateway
        self._answer = answer
        self._random = random.Random(self.name)
        self.peers.watch(self._watch)
        network.listen(self, COMMAND, self._on_command, worker=instance)
        network.listen(self, STOP, self._on_stop, worker=instance)
        network.listen(self, OPEN, self._on_open, model=MODEL)
        network.listen(self, RUNNING_FETCH, self._on_list_request, worker=instance)

    def start(self) -> None:
        super().start()
        self.every(0.25, self._tick)

    def report(self) -> Report:
        as_changes = self.peers.read_by_all(RunningList, *LIST_READERS)
        listed, changes = self.output.list_changes() if as_changes else (None, ())
        last = self.engine.last
        load = WorkerLoad(
            pages_free=last.capacity.pages_free + last.capacity.pages_evictable,
            pages_total=self.engine.core.pages_total,
            page_tokens=self.engine.page_tokens,
            running=() if as_changes else self.output.held(),
            listed=listed,
            waiting=last.totals.waiting,
            running_max=self.running_max,
            step=last.step,
            step_age_s=0.0,
            context_tokens=self.engine.core.limits.context_tokens,
            pages_promised=last.capacity.pages_reserved,
            pages_returning=last.capacity.pages_returning,
            term=self.output.commands.term,
            commands_seq=self.output.commands.seq,
            refused=self.output.commands.refused,
            paused=last.paused,
            hands_back=self.hands_back,
        )
        return Report(
            load=self.output.live_count,
            worker=load,
            changes=changes,
            streams=self.seqs.streams(),
            reads=LEADER_READS,
        )

    def pause(self, seconds: float) -> None:
        """Run no steps for a while, with or without the pages of what runs."""
        self._pauses += 1
        mode = self._random.choice((PauseMode.IN_PLACE, PauseMode.RETRACT))
        self.engine.mailbox.submit_command(PauseWorker(mode=mode))
        self._wake()

        def resume() -> None:
            self._pauses -= 1
            if not self._pauses:
                self.engine.mailbox.submit_command(ContinueWorker())
                self._wake()

        self.timeline.after(seconds, lambda: self.run(resume))

    def drain(self, left: Callable[[], None], *, migrate: bool) -> None:
        """Take nothing new, give back what has not begun, and leave when the rest has ended.

        With `migrate`, the rest is to be continued on other workers.
        """
        self.hands_back = migrate
        self.state = ProcessState.DRAINING
        self.output.draining = True
        self.left = left
        self.beat()

    def _on_command(self, batch: CommandBatch) -> None:
        offset_ms = self.peers.offset_ms(batch.leader.scheduler)
        self._act(self.output.command(batch, self.clock.unix_ms(), offset_ms))

    def _on_stop(self, message: StopChoice | ResendTokens) -> None:
        if isinstance(message, StopChoice):
            self._act(self.output.stop(message))
        else:
            self._act(self.output.resend(message))

    def _on_list_request(self, message: FetchRunningList) -> None:
        if parts := self.output.list_requested(message, self.clock.unix_ms()):
            for part in parts:
                self.say(RUNNING, part, model=MODEL, worker=self.process.instance)
            self.beat()

    def _on_open(self, message: OpenList | OpenListState) -> None:
        self._act(self.output.open_list(message, self.clock.unix_ms()))

    def _watch(self, change: PeerChange, peer: Peer) -> None:
        if change is PeerChange.DIED and peer.heartbeat.role is Role.GATEWAY:
            self._act(self.output.owner_died(peer.process, self.clock.unix_ms()))

    def _act(self, actions: Iterable[WorkerAction]) -> None:
        for action in actions:
            if isinstance(action, RunChoice):
                if action.state.media:
                    self._load(action)
                else:
                    self._run(action)
            elif isinstance(action, FetchOpenList):
                self.say(OPEN_FETCH, action, gateway=action.gateway.instance)
            elif isinstance(action, FetchPrompt):
                self.fetching.add((action.request_id, action.attempt))
                self._fetch(action, self.clock.now() + FETCH_GIVEN_UP_S)
            elif isinstance(action, DropPrompt):
                self.fetching.remove((action.request_id, action.attempt))
            elif action.key in self.loading:
                self.loading.remove(action.key)
            else:
                self.engine.mailbox.drop(action.key, action.kept)
                self._wake()
        self._publish()

    def _run(self, wanted: RunChoice) -> None:
        state = msgspec.structs.replace(wanted.state, media=())  # its model sees none
        before = bytes(list(unpack_ids(state.output_ids)))
        answer = self._answer(state.prompt_ids, state.choice, before)
        self._states[wanted.key] = state
        self.engine.run(wanted.key, state, answer)
        self._wake()

    def _load(self, wanted: RunChoice) -> None:
        """Fetch the medium of a choice before it runs, as `EmbeddingClient` does."""
        self.loading.add(wanted.key)
        known, lost_at, until = wanted.state.media[0].claim, math.inf, math.inf

        def fetch() -> None:
            nonlocal known, lost_at, until
            held = self.output.find(wanted.state.request_id)
            if held is None or wanted.key not in self.loading:
                return
            now, claim = self.clock.now(), held.media[0].claim
            if claim != known:
                known, lost_at, until = claim, math.inf, math.inf
            gateway = self._gateway(claim.address)
            reached = gateway is not None and gateway.frozen_until <= self.timeline.clock.now()
            if gateway is not None and reached and gateway.has_medium(claim):
                self.loading.remove(wanted.key)
                self._run(wanted)
                return
            lost_at = min(lost_at, now)
            if until == math.inf and (reached or now - lost_at >= FETCH_GIVEN_UP_S):
                until = now + held.resume_ms / 1000 + FETCH_GIVEN_UP_S
            if now < until:
                self.timeline.after(FETCH_RETRY_S, lambda: self.run(fetch))
                return
            self.loading.remove(wanted.key)
            self.output.refuse(wanted.key, BlobGone("no gateway has the medium"))
            self._act(self.output.take_actions())

        pause_s = self._media_random.uniform(0, 0.3)
        self.timeline.after(pause_s, lambda: self.run(fetch))

    def _fetch(self, wanted: FetchPrompt, until: float) -> None:
        """Connect to the gateway until it answers, as `PromptFetcher` does."""

        def connect() -> None:
            if (key := (wanted.request_id, wanted.attempt)) not in self.fetching:
                return
            gateway = self._gateway(wanted.claim.address)
            if gateway is None or gateway.frozen_until > self.timeline.clock.now():
                if self.clock.now() < until:
                    self.timeline.after(FETCH_RETRY_S, lambda: self.run(connect))
                    return
                prompt = None
            else:
                prompt = gateway.send_prompt(wanted.claim)
            self.fetching.remove(key)
            if prompt is None:
                self._act(self.output.prompt_failed(wanted, BlobGone("gone")))
            else:
                self._act(self.output.prompt_fetched(wanted, prompt))

        self.timeline.after(self._random.uniform(0, 0.3), lambda: self.run(connect))

    def _wake(self) -> None:
        """Let the loop go on, which sleeps while it has neither mail nor work."""
        if not self.awake:
            self.awake = True
            pause_s = self._random.uniform(0, STEP_S)
            self.timeline.after(pause_s, partial(self.run, self._step))

    def _step(self) -> None:
        if (report := self.engine.turn()) is not None:
            self._on_report(report)
        self._publish()
        self.awake = report is not None or self.output.has_unsent
        if self.awake:
            self.timeline.after(STEP_S, partial(self.run, self._step))

    def _on_report(self, report: StepReport) -> None:
        """Take in a step, as the thread of the loop does; that of the events goes on with it."""
        self.output.started(report.started)
        for state in map(self._states.__getitem__, report.started):
            self.begun(state.request_id, state.choice)
        self.output.step(report.step, report.progress, link_up=self.link_up)
        self.timeline.after(REPORT_S, lambda: self.run(partial(self._on_queued_report, report)))

    def _on_queued_report(self, report: StepReport) -> None:
        self._act(self.output.take_actions())
        if report.returned:
            self._act(self.output.requeued(report.returned))
        if report.returned or report.paused != self._paused:
            self._paused = report.paused
            self.beat()
        assert self.engine.runs_only(self.output._choices.__contains__), "a choice was not dropped"

    def _give_back(self) -> None:
        for keys in self.output.unstarted(self.clock.unix_ms()):
            if not self.loading.isdisjoint(keys):
                continue
            self.engine.mailbox.requeue(keys)
            self._wake()

    def _tick(self) -> None:
        self._act(self.output.tick(self.clock.unix_ms()))
        if self.left is not None or self._random.random() < self.fickle:
            self._give_back()
        if self.left is not None and not self.output.held_count and not self.output.has_unsent:
            self.left()

    def _publish(self) -> None:
        if self.link_up and self.output.has_unsent:
            for detokenizer, batch in self.output.take():
                self.say(TOKENS, batch, detokenizer=detokenizer)


class DetokenizerNode(Node):
    """Reads bytes as UTF-8."""

    role = Role.DETOKENIZER

    def __init__(
        self,
        timeline: Timeline,
        network: Network,
        instance: str,
        life: int,
        message_bytes_max: int,
    ) -> None:
        super().__init__(timeline, network, instance, life)
        self._message_bytes_max = message_bytes_max
        # Some are of an earlier version, which cannot read what came later.
        self.reads = () if random.Random(self.name).random() < 0.3 else READS
        self.machine = Detokenizer(
            self.process,
            lambda ids, _: bytes(ids).decode(errors="replace"),
            256,
            our_time_ms=self.peers.to_local_ms,
        )
        self.peers.watch(self._watch)
        here = {"detokenizer": instance}
        network.listen(self, TOKENS, self._on_tokens, **here)
        network.listen(self, OPEN, self._on_open, model=MODEL)
        network.listen(self, DETOKENIZER_CONTROL, self._on_control, **here)

    def start(self) -> None:
        super().start()
        self.every(0.5, self._tick)

    def report(self) -> Report:
        streams = self.machine.sent.items()
        return Report(
            load=self.machine.live,
            streams=tuple(StreamSeq(receiver=gateway, seq=seq) for gateway, seq in streams),
            reads=self.reads,
        )

    def _on_tokens(self, news: TokenNews) -> None:
        if isinstance(news, TokenBatch) and news.columns is not None and not self.reads:
            # Meant for the life before. What it cannot read is to it as what it did not get.
            if not news.rows:
                return
            news = msgspec.structs.replace(news, columns=None)
        self._act(self.machine.on_tokens(news, self.clock.now()))

    def _on_open(self, message: OpenList | OpenListState) -> None:
        if isinstance(message, OpenListState) and not self.reads:
            return  # sent before its gateway knew of it
        if not self.peers.is_expired(message.not_after_unix_ms, message.owner):
            self._act(self.machine.on_open_list(message, self.clock.now()))

    def _on_control(self, message: ResumeText | SealAttempts) -> TextResumed | AttemptsSealed:
        if isinstance(message, SealAttempts):
            return self.machine.on_seal(message, self._message_bytes_max)
        rows, actions = self.machine.on_resume(message)
        self._act(actions)
        return TextResumed(rows=rows)

    def _watch(self, change: PeerChange, peer: Peer) -> None:
        if peer.heartbeat.role is Role.WORKER and change is not PeerChange.DIED:
            for stream in peer.heartbeat.streams:
                if stream.receiver == self.process.instance:
                    now = self.clock.now()
                    self._act(self.machine.on_worker_seq(peer.process, stream.seq, now))
        elif peer.heartbeat.role is Role.WORKER:
            self.machine.on_worker_died(peer.process)
        elif peer.heartbeat.role is Role.GATEWAY and change is PeerChange.DIED:
            self._act(self.machine.on_owner_died(peer.process, self.clock.now()))

    def _act(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case TextBatch():
                    self.say(TEXT, action, gateway=action.gateway.instance)
                case SendStop(worker, stop):
                    self.say(STOP, stop, worker=worker)
                case ResendTokens(worker=worker):
                    self.say(STOP, action, worker=worker.instance)
                case FetchOpenList(gateway=gateway):
                    self.say(OPEN_FETCH, action, gateway=gateway.instance)

    def _tick(self) -> None:
        self._act(self.machine.on_tick(self.clock.now(), self.clock.unix_ms()))
