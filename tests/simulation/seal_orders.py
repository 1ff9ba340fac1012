"""The hardest case of a migration: two leaders seal one request, in any order of what happens.

Leader A seals and is cut off before it admits; B leads; the old worker wakes up and sends; the
answer to A arrives late; B seals again; the owner submits again. The machines are the real ones.
The detokenizer may have died with the worker, so that only the owner has the output. Each attempt
continues with a letter of its own, so that a mixture of two attempts shows.
"""

from __future__ import annotations

import hashlib
import itertools
from typing import TYPE_CHECKING

from tests.support.clock import ManualClock
from tests.unit.scheduler.stage import GATEWAY, MODEL, Actor, Stage, open_entry, process, sent_to

from antiphon.config.gateway import GatewayConfig
from antiphon.detokenizer.machine import Detokenizer
from antiphon.gateway.owner.actions import Action, Deliver, Ended, TextDelta
from antiphon.gateway.owner.machine import Owner
from antiphon.wire.base import FinishReason, Role
from antiphon.wire.claim import Claim, PromptClaim
from antiphon.wire.codec import pack_ids, unpack_ids
from antiphon.wire.errors import EngineError, Unavailable
from antiphon.wire.submit import NoticeBatch, SubmitRequest, claimed_submit
from antiphon.wire.text import ResumeText, TextBatch
from antiphon.wire.tokens import TokenBatch, TokenRow, TokenStream

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from antiphon.detokenizer.machine import Action as DetokenizerAction
    from antiphon.scheduler.outbox import SealCall
    from antiphon.wire.base import Attempt, Process
    from antiphon.wire.command import Admit
    from antiphon.wire.seal import AttemptsSealed

EVENTS = ("a_seals", "b_leads", "worker_wakes", "answer_reaches_a", "b_seals", "owner_resubmits")
SHOWN = "abc"
"""What the owner has delivered when the worker freezes; the detokenizer has that and `d`."""
DEADLINE_S = 300.0


class Leader(Stage):
    """A scheduler whose seal calls reach the detokenizer; their answers may be kept."""

    def __init__(self, world: SealOrders, clock: ManualClock) -> None:
        super().__init__(clock=clock)
        self.keeps_answers = False
        self.kept: list[tuple[SealCall, AttemptsSealed]] = []
        self._world = world

    def _seal(self, call: SealCall) -> None:
        answer = self._world.detokenizer.on_seal(call.message, 1_000_000)
        if self.keeps_answers:
            self.kept.append((call, answer))
        else:
            self.leader.on_sealed(call, answer)


class SealOrders:
    """One request, its owner, its detokenizer, three workers, and leaders A and B.

    With `forgets` the detokenizer is started again when the worker freezes. With `claims` the
    prompt stays at its gateway, and workers fetch it.
    """

    def __init__(self, *, forgets: bool = False, claims: bool = False) -> None:
        self.clock = ManualClock()
        self.detokenizer = _detokenizer(1)
        self.owner = Owner(GATEWAY, MODEL, self.clock, GatewayConfig())
        self.text = ""
        self.ended: Ended | None = None
        self._ended_by: Attempt | None = None
        self.truths: dict[Attempt, str] = {}
        self._running: dict[Process, Admit] = {}
        self._seqs: dict[Process, int] = {}
        self._a, self._b = Leader(self, self.clock), Leader(self, self.clock)
        gateway, worker, _ = self._a.usual()
        self._old = worker.process
        self._request = self._a.request("r", deadline_s=DEADLINE_S)
        self._prompt = _claim(self._request) if claims else None
        self._reads = (PromptClaim.__name__,) if claims else ()
        worker.reads = self._reads
        worker.beat()
        gateway.open[self._request.request_id] = open_entry(self._request)
        self._leader: Leader = self._a
        self._prompt_tokens = self._request.prompt_tokens
        self._own(self.owner.leader_changed(self._a.leader.term))
        self._own(self.owner.open(self._request))
        (self._first,) = self._a.admits()
        self._send(self._first, self._old, SHOWN, 0)
        assert self.text == SHOWN
        self._a.actors.remove(worker)
        if forgets:
            self.detokenizer = _detokenizer(2)
        for leader in (self._a, self._b):
            other = leader.enter(Role.WORKER, "worker-1" if leader is self._a else "worker-2")
            other.reads = self._reads
            other.beat()
        self._b.enter(Role.GATEWAY, "gateway-0")
        self._b.enter(Role.DETOKENIZER, "detokenizer-0", 2 if forgets else 1)
        self._b.enter(Role.SCHEDULER, "scheduler-9").claim(5)  # so that B's term is a higher one
        self._b.actors.pop()

    # The six events.

    def a_seals(self) -> None:
        """A knows that the worker has died; the answer of the detokenizer is under way."""
        self._a.keeps_answers = True
        self._a.peers.on_exit(self._old)
        self._a.listen()

    def b_leads(self) -> None:
        self._leader = self._b
        while self._b.leader.term is None:
            self._pass(0.5)

    def worker_wakes(self) -> None:
        """It sends what it computed before it froze."""
        self._send(self._first, self._old, "d", len(SHOWN))
        # A detokenizer that lacks what is before it asks for it.
        self._send(self._first, self._old, SHOWN + "d", 0)

    def answer_reaches_a(self) -> None:
        """And what A admits then reaches its worker."""
        for call, answer in self._a.kept:
            self._a.leader.on_sealed(call, answer)
        self._a.kept = []
        self._a.listen()
        self._serve(self._a)

    def b_seals(self) -> None:
        """B learns from the owner's open list that a request runs nowhere."""
        if self._leader is self._b:
            self._pass(4.0)

    def owner_resubmits(self) -> None:
        self.clock.advance(0.1)
        self._own(self.owner.leader_changed(self._leader.leader.term))
        self._own(self.owner.tick())

    def finish(self) -> None:
        """Whatever was missing happens; the request has to end, as one attempt has it."""
        if self._leader is self._a:
            self.b_leads()
        self.owner_resubmits()
        for _ in range(40):
            self._pass(0.5)
            self._serve(self._b, to_end=True)
            self._own(self.owner.tick())
            if self.ended is not None:
                break
        assert self.ended is not None, "it hangs"
        assert self.ended.error is None, self.ended.error
        assert self._ended_by is not None
        assert self.text == self.truths[self._ended_by], f"{self.truths}, by {self._ended_by}"

    # What carries messages between the machines.

    def _pass(self, seconds: float) -> None:
        """Let time pass for B, whose peers report what is."""
        for actor in self._b.actors:
            self._report(actor)
        self._b.pass_s(seconds)
        self._serve(self._b)

    def _report(self, actor: Actor) -> None:
        if actor.role is Role.GATEWAY and self.ended is None:
            request = self.owner._requests[self._request.request_id]
            line = open_entry(self._request, request.attempt)
            actor.open[line.request_id] = line
        elif actor.role is Role.WORKER and (admit := self._running.get(actor.process)) is not None:
            where = self.detokenizer._process
            actor.runs(sent_to(where, admit.request_id, admit.attempt))

    def _serve(self, leader: Leader, *, to_end: bool = False) -> None:
        """Run what a leader has admitted since, and carry its notices."""
        actions, leader.actions = leader.actions, []
        for action in actions:
            if isinstance(action, NoticeBatch):
                self._own(self.owner.notice_arrived(action))
        leader.actions = actions
        for admit in leader.admits():
            assert (admit.prompt, admit.prompt_tokens) == (self._prompt, self._prompt_tokens)
            worker = next(b.worker for b in leader.batches() if admit in b.commands)
            if admit.attempt in self.truths:
                continue
            self._running[worker] = admit
            letter = str(len(self.truths))
            self._send(admit, worker, letter, 0)
        leader.actions = []
        if to_end:
            for worker, admit in self._running.items():
                self._send(admit, worker, "", -1, finish=FinishReason.LENGTH)

    def _send(
        self,
        admit: Admit,
        worker: Process,
        more: str,
        offset: int,
        finish: FinishReason | None = None,
    ) -> None:
        """Send tokens from an offset on: first those that the attempt continues."""
        before = bytes(list(unpack_ids(admit.choices[0].output_ids))).decode()
        text = before + more if offset == 0 else more
        if offset == 0:
            self.truths[admit.attempt] = text
        elif offset > 0:
            self.truths[admit.attempt] += more
        else:
            offset = len(self.truths[admit.attempt])
        stream = TokenStream(
            owner=GATEWAY,
            prompt_tokens=8,
            continues=admit.continues,
            lineage=admit.lineage,
            owner_sealed=admit.owner_sealed,
            deadline_unix_ms=self._request.deadline_unix_ms,
        )
        row = TokenRow(
            request_id=admit.request_id,
            choice=0,
            attempt=admit.attempt,
            offset=offset,
            token_ids=pack_ids(text.encode()),
            stream=stream,
            finish_reason=finish,
        )
        seq = self._seqs[worker] = self._seqs.get(worker, 0) + 1
        batch = TokenBatch(worker=worker, seq=seq, step=seq, rows=(row,))
        self._texts(self.detokenizer.on_tokens(batch, self.clock.now()))

    def _texts(self, actions: Iterable[DetokenizerAction]) -> None:
        for action in actions:
            if isinstance(action, TextBatch):
                self._own(self.owner.text_arrived(action))
                if self.ended is not None and self._ended_by is None:
                    self._ended_by = action.rows[-1].attempt

    def _own(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Deliver(_, TextDelta() as delta):
                    self.text += delta.text
                case Deliver(_, Ended() as ended):
                    self.ended = ended
                case SubmitRequest():
                    self._submit(action)
                case ResumeText():
                    _, texts = self.detokenizer.on_resume(action)
                    self._texts(texts)
                    self._own(self.owner.text_answered(action.detokenizer, answered=True))
                case _:
                    pass

    def _submit(self, submit: SubmitRequest) -> None:
        """To whoever leads; A is cut off after its seal."""
        if self._prompt is not None:
            submit = claimed_submit(submit, self._prompt)
        leads = self._leader.leader.term is not None and not self._leader.keeps_answers
        try:
            if not leads:
                raise Unavailable("nobody hears it", retry_after_s=0.1)
            answer = self._leader.leader.submit(submit)
        except EngineError as error:
            self._own(self.owner.submit_answered(submit.request_id, error))
            return
        self._leader.listen()
        self._own(self.owner.submit_answered(submit.request_id, answer))


def _claim(request: SubmitRequest) -> PromptClaim:
    digest, size_bytes = hashlib.sha256(request.prompt_ids).digest(), len(request.prompt_ids)
    claim = Claim(
        address="a:1", token="00", size_bytes=size_bytes, digest=digest, expires_unix_ms=0
    )
    return PromptClaim(claim=claim)


def _detokenizer(life: int) -> Detokenizer:
    here = process("detokenizer-0", life)
    return Detokenizer(here, lambda ids, _: bytes(ids).decode(), requests_max=4)


ORDERS = tuple(itertools.permutations(EVENTS))


def live(order: Sequence[str], *, forgets: bool = False, claims: bool = False) -> None:
    """Let the events happen in this order."""
    world = SealOrders(forgets=forgets, claims=claims)
    for event in order:
        getattr(world, event)()
    world.finish()
