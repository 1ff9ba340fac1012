"""A leader and a detokenizer around an owner, on a virtual clock and a lossy network."""

from __future__ import annotations

import heapq
import itertools
import random
from contextlib import ExitStack
from typing import TYPE_CHECKING

from tests.support.clock import ManualClock

from antiphon.config.gateway import GatewayConfig
from antiphon.gateway.owner.actions import Accepted, Action, Deliver, Ended, Finished, TextDelta
from antiphon.gateway.owner.machine import Owner
from antiphon.wire.base import Attempt, FinishReason, Process, Term, Usage
from antiphon.wire.claim import Claim
from antiphon.wire.errors import DeadlineExceeded, EngineError
from antiphon.wire.heartbeat import StreamSeq
from antiphon.wire.ids import DEFAULT_TENANT, Incarnation, InstanceId, ModelName, RequestId
from antiphon.wire.media import Medium, MediumSpan
from antiphon.wire.sampling import SamplingParams
from antiphon.wire.submit import (
    CancelRequest,
    OpenList,
    RequestAdopted,
    SubmitAccepted,
    SubmitRequest,
)
from antiphon.wire.text import ResumeText, TextBatch, TextRow

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ME = Process(instance=InstanceId("gateway-0"), incarnation=Incarnation("me"))
LEADER = Process(instance=InstanceId("scheduler-0"), incarnation=Incarnation("first"))
MODEL = ModelName("m")
TIMEOUT_S = 20.0
CALL_S = 1.0
LETTERS = "ab ñ日🙂"


def submission(request_id: str, clock: ManualClock, timeout_s: float = TIMEOUT_S) -> SubmitRequest:
    return SubmitRequest(
        request_id=RequestId(request_id),
        owner=ME,
        tenant=DEFAULT_TENANT,
        model=MODEL,
        digest=b"",
        prompt_ids=b"",
        sampling=SamplingParams(max_new_tokens=8),
        deadline_unix_ms=clock.unix_ms() + round(timeout_s * 1000),
    )


class Received:
    """What the client of one request has seen."""

    def __init__(self, at: float) -> None:
        self.opened_at = at
        self.text = ""
        self.finished: Finished | None = None
        self.ended: Ended | None = None
        self.ended_at = 0.0

    def receive(self, event: Accepted | TextDelta | Finished | Ended, at: float) -> None:
        assert self.ended is None, f"{event} after the end"
        match event:
            case TextDelta():
                assert event.text_offset == len(self.text.encode())
                self.text += event.text
            case Finished():
                assert self.finished is None
                assert event.text_bytes == len(self.text.encode())
                self.finished = event
            case Ended():
                self.ended, self.ended_at = event, at
            case Accepted():
                pass


class Detokenizer:
    """Says a random text a request, in batches; says again what it is asked for."""

    def __init__(self, name: str, term: Term) -> None:
        self.process = Process(instance=InstanceId("detokenizer-0"), incarnation=Incarnation(name))
        self.attempt = Attempt(term=term, n=1)
        self.texts: dict[RequestId, list[str]] = {}
        self.said: dict[RequestId, int] = {}
        self.seq = 0

    def row(self, request_id: RequestId, offset: int, text: str) -> TextRow:
        pieces = self.texts[request_id]
        over = self.said[request_id] == len(pieces)
        return TextRow(
            request_id=request_id,
            choice=0,
            attempt=self.attempt,
            text_offset=offset,
            text=text,
            finish_reason=FinishReason.STOP if over else None,
            usage=Usage(prompt_tokens=1, completion_tokens=len(pieces)) if over else None,
        )

    def batch(self, rows: Sequence[TextRow]) -> TextBatch:
        self.seq += 1
        return TextBatch(detokenizer=self.process, gateway=ME, seq=self.seq, rows=tuple(rows))

    def step(self) -> TextBatch | None:
        rows: list[TextRow] = []
        for request_id, pieces in self.texts.items():
            n = self.said[request_id]
            if n < len(pieces):
                self.said[request_id] += 1
                rows.append(self.row(request_id, len("".join(pieces[:n]).encode()), pieces[n]))
        return self.batch(rows) if rows else None

    def again(self, message: ResumeText) -> TextBatch:
        places = {place.request_id: place.text_offset for place in message.places}
        rows: list[TextRow] = []
        for request_id, pieces in self.texts.items():
            start = places.get(request_id, 0)
            said = "".join(pieces[: self.said[request_id]]).encode()
            if start <= len(said):
                rows.append(self.row(request_id, start, said[start:].decode()))
        return self.batch(rows)

    def whole(self, request_id: RequestId) -> TextRow:
        return self.row(request_id, 0, "".join(self.texts[request_id]))


class World:
    """Everything but the owner, driven by one seed."""

    def __init__(self, seed: int, loss: float = 0.1) -> None:
        self.random = random.Random(seed)
        self.loss = loss
        self.clock = ManualClock()
        self.owner = Owner(ME, MODEL, self.clock, GatewayConfig(unread_bytes_max=4096))
        self.term = Term(number=1, scheduler=LEADER)
        self.detokenizer = Detokenizer("first", self.term)
        self.received: dict[RequestId, Received] = {}
        self.truth: dict[RequestId, str] = {}
        self.lost: set[RequestId] = set()
        self.tombstones: set[RequestId] = set()
        self.submitted: dict[RequestId, SubmitRequest] = {}  # what a leader has got last
        self.lists: list[OpenList] = []
        self.asks = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def later(self, pause_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.clock.now() + pause_s, next(self._numbers), event))

    def open(self, request_id: RequestId) -> None:
        self.truth[request_id] = ""
        self.received[request_id] = Received(self.clock.now())
        self.do(self.owner.open(submission(request_id, self.clock)))

    def adopt(self, request_id: RequestId) -> None:
        """Resume another gateway's request, all of which has been generated.

        Its text is sent when the leader changes the owner, and may arrive before the leader's
        answer, which may be lost; the second one is not.
        """
        self.received[request_id] = Received(self.clock.now())
        answer = RequestAdopted(
            submit=submission(request_id, self.clock), term=self.term, attempt=None, changed=True
        )
        adopting = ExitStack()
        adopting.enter_context(self.owner.adopting(request_id))
        self._begin(request_id)
        self.detokenizer.said[request_id] = len(self.detokenizer.texts[request_id])
        self.say(self.detokenizer.batch([self.detokenizer.whole(request_id)]))

        def answered() -> None:
            adopting.close()
            self.do(self.owner.adopt(answer))

        first_is_lost = self.random.random() < self.loss
        self.later(CALL_S if first_is_lost else self.random.choice((0.001, 0.05)), answered)

    def leave(self, request_id: RequestId) -> None:
        self.do(self.owner.cancel(request_id))

    def lead_anew(self) -> None:
        self.term = Term(number=self.term.number + 1, scheduler=LEADER)
        self.do(self.owner.leader_changed(self.term))

    def kill_detokenizer(self) -> None:
        dead = self.detokenizer
        self.lost |= dead.texts.keys()
        self.detokenizer = Detokenizer(f"after {dead.process.incarnation}", self.term)
        self.do(self.owner.detokenizer_died(dead.process))

    def beat(self) -> None:
        """Heartbeats, which are lost like anything else."""
        now = self.detokenizer
        streams = (StreamSeq(receiver=ME.instance, seq=now.seq),)
        self.send(lambda: self.do(self.owner.detokenizer_heartbeat(now.process, streams)))
        self.later(0.5, self.beat)

    def step(self) -> None:
        batch = self.detokenizer.step()
        if batch is not None:
            self.say(batch)
        self.later(0.02, self.step)

    def say(self, batch: TextBatch) -> None:
        for _ in range(2 if self.random.random() < self.loss else 1):
            self.send(lambda: self.do(self.owner.text_arrived(batch)))

    def send(self, event: Callable[[], None]) -> None:
        """Lost, late or both: what comes later may arrive first."""
        if self.random.random() >= self.loss:
            self.later(self.random.choice((0.001, 0.001, 0.03)), event)

    def run(self, until: float) -> None:
        """Pass the time, always to whatever is next."""
        while True:
            next_event = self._events[0][0] if self._events else until
            at = min(next_event, self.owner.wake_at(), until)
            self.clock.advance(max(0.0, at - self.clock.now()))
            if self.owner.wake_at() <= self.clock.now():
                self.do(self.owner.tick())
            elif self._events and next_event <= self.clock.now():
                heapq.heappop(self._events)[2]()
            else:
                return

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Deliver():
                    self._deliver(action)
                case OpenList():
                    self.lists.append(action)
                case SubmitRequest():
                    self._submit(action)
                case CancelRequest():
                    self._cancel(action.request_id)
                case ResumeText():
                    self._ask(action)

    def _deliver(self, action: Deliver) -> None:
        received = self.received[action.request_id]
        received.receive(action.event, self.clock.now())
        if isinstance(action.event, TextDelta):
            self.owner.mark_consumed(action.request_id, len(action.event.text.encode()))

    def _begin(self, request_id: RequestId) -> None:
        pieces = ["".join(self.random.choices(LETTERS, k=3)) for _ in range(20)]
        self.truth[request_id] = "".join(pieces)
        self.detokenizer.texts[request_id] = pieces
        self.detokenizer.said[request_id] = 0

    def _submit(self, message: SubmitRequest) -> None:
        """A call whose request, or whose answer, may be lost."""
        request_id = message.request_id
        answer: SubmitAccepted | EngineError = DeadlineExceeded("no answer")
        answered = False
        if self.random.random() >= self.loss:
            self.submitted[request_id] = message
            known = self.detokenizer.texts.keys() | self.lost | self.tombstones
            if request_id not in known:
                assert message.attempt_floor is None
                self._begin(request_id)
            answered = self.random.random() >= self.loss
        if answered:
            answer = SubmitAccepted(request_id=request_id, term=self.term, position=0)
        self._answer(answered, lambda: self.owner.submit_answered(request_id, answer))

    def _cancel(self, request_id: RequestId) -> None:
        accepted = self.random.random() >= self.loss
        if accepted:
            self.tombstones.add(request_id)
            self.detokenizer.texts.pop(request_id, None)
        self._answer(accepted, lambda: self.owner.cancel_answered(request_id, accepted=accepted))

    def _ask(self, message: ResumeText) -> None:
        self.asks += 1
        to = message.detokenizer
        answered = to == self.detokenizer.process and self.random.random() >= self.loss
        if answered:
            self.say(self.detokenizer.again(message))
        self._answer(answered, lambda: self.owner.text_answered(to, answered=answered))

    def _answer(self, answered: bool, event: Callable[[], list[Action]]) -> None:
        """What the owner does when a call is answered, or has waited for an answer in vain."""
        self.later(0.001 if answered else CALL_S, lambda: self.do(event()))


def renew_media(seed: int) -> None:
    """A request that waits has its media at its gateway some time after it was adopted.

    Whatever is lost, repeated or led anew meanwhile, a leader has their claims soon after.
    """
    world, request_id = World(seed, loss=0.2), RequestId("r")
    chance = world.random
    world.open(request_id)
    if chance.random() < 0.5:
        world.later(chance.uniform(0, 2), world.lead_anew)
    moment = chance.choice((0.0, 0.0005, chance.uniform(0.001, 3)))
    claims = (medium("here:1"),)
    world.later(moment, lambda: world.do(world.owner.renew_media(request_id, claims)))
    world.run(TIMEOUT_S - 1)
    ended = world.received[request_id].ended
    assert ended is not None or world.submitted[request_id].media == claims


def medium(address: str, token: str = "00") -> Medium:
    claim = Claim(address=address, token=token, size_bytes=1, digest=bytes(32), expires_unix_ms=0)
    span = MediumSpan(start=0, tokens=1, key=bytes(32))
    return Medium(span=span, width=1, height=1, claim=claim)


def open_by(lists: Sequence[OpenList]) -> set[RequestId]:
    """What a holder believes to be open that has received every list."""
    believed: set[RequestId] = set()
    for message in lists:
        opened = {line.request_id for line in message.opened}
        believed = opened if message.whole else (believed | opened) - set(message.closed)
    return believed
