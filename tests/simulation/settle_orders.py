"""A new leader settles: it learns from lists and reports what is open and what runs, in any order.

Four requests of one gateway are with an old leader: one runs, one has begun and shows nothing yet,
one ends, and one waits; a fifth arrives meanwhile. The gateway's list goes out by changes; all of
it, in parts, where a change is lost. The machines are the real ones.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from typing import TYPE_CHECKING

from tests.support.clock import ManualClock
from tests.unit.scheduler.stage import GATEWAY, MODEL, Actor, Stage, held, process, sent_to

from antiphon.config.gateway import GatewayConfig
from antiphon.gateway.owner.machine import Owner
from antiphon.wire.base import Attempt, Role, Term
from antiphon.wire.errors import EngineError
from antiphon.wire.submit import (
    CancelRequest,
    FetchOpenList,
    OpenList,
    OpenListState,
    SubmitAccepted,
    SubmitRequest,
)
from antiphon.wire.text import TextBatch, TextRow

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from antiphon.gateway.owner.actions import Action
    from antiphon.wire.ids import RequestId

EVENTS = ("leads", "owner_learns", "list_is_due", "one_ends", "one_arrives", "worker_reports")
OLD = Term(number=1, scheduler=process("scheduler-9"))
DETOKENIZER = process("detokenizer-0")
DEADLINE_S = 300.0


class Peer(Actor):
    """Its open list, if it is a gateway, comes from the owner."""

    def list(self, *, whole: bool, closed: tuple[RequestId, ...] = (), version: int = 0) -> None:
        del whole, closed, version


class SettleOrders:
    """The new leader, the owner of the requests, and the worker that runs some.

    `lag` messages of the list are under way before the first of them arrives; the one numbered
    `lost` is lost, and all that follows it of the same event.
    """

    def __init__(self, *, lag: int, lost: int | None) -> None:
        self.clock = ManualClock()
        self.stage = Stage(clock=self.clock)
        self.leader = self.stage.leader
        # Few lines a part, so that the whole list is sent as several messages.
        self.owner = Owner(GATEWAY, MODEL, self.clock, GatewayConfig(), list_part_max=1)
        self.begun: Counter[RequestId] = Counter()
        self.ended: set[RequestId] = set()
        self._lag = lag
        self._lost = lost
        self._sent = 0
        self._under_way: deque[OpenList | OpenListState] = deque()
        self._learned = False
        for role, name in ((Role.GATEWAY, "gateway-0"), (Role.DETOKENIZER, "detokenizer-0")):
            self._enter(role, name)
        self._worker = self._enter(Role.WORKER, "worker-0")
        self._own(self.owner.leader_changed(OLD))
        self.runs, self.ends, self.waits = map(self._open, ("runs", "ends", "waits"))
        for number, request in enumerate((self.runs, self.ends), 1):
            self._show(request, number)
        self.begins = self._open("begins")
        self._run(self.begins, 3)
        self._worker.silent = True

    def _enter(self, role: Role, name: str) -> Peer:
        peer = Peer(self.stage, role, process(name))
        self.stage.actors.append(peer)
        peer.beat()
        return peer

    def _open(self, name: str) -> SubmitRequest:
        request = self.stage.request(name, deadline_s=DEADLINE_S)
        self._own(self.owner.open(request))
        return request

    def _show(self, request: SubmitRequest, n: int) -> None:
        """The owner shows text of an attempt, which a worker runs."""
        attempt = Attempt(term=OLD, n=n)
        row = TextRow(
            request_id=request.request_id, choice=0, attempt=attempt, text_offset=0, text="a"
        )
        batch = TextBatch(detokenizer=DETOKENIZER, gateway=GATEWAY, seq=n, rows=(row,))
        self._own(self.owner.text_arrived(batch))
        self._run(request, n)

    def _run(self, request: SubmitRequest, n: int) -> None:
        line = sent_to(DETOKENIZER, request.request_id, Attempt(term=OLD, n=n))
        self._worker.runs(*self._worker.load.running, line)

    # The six events.

    def leads(self) -> None:
        """The new leader claims its term; lists and reports from before do not count."""
        while self.leader.term is None:
            self._pass(0.1)

    def owner_learns(self) -> None:
        """The owner learns of the new leader, and submits everything to it."""
        self._learned = True
        term = self.leader.term or Term(number=2, scheduler=process("scheduler-0"))
        self._own(self.owner.leader_changed(term))

    def list_is_due(self) -> None:
        self._pass(0.5)
        self._own(self.owner.tick())

    def one_ends(self) -> None:
        """Its client leaves, and its worker stops it later."""
        self.ended.add(self.ends.request_id)
        self._own(self.owner.cancel(self.ends.request_id))

    def one_arrives(self) -> None:
        self.arrives = self._open("arrives")

    def worker_reports(self) -> None:
        self._worker.silent = False
        self._worker.beat()
        self._listen()

    def finish(self) -> None:
        """Some seconds pass, in which nothing is lost."""
        self._lag, self._lost = 0, None
        for _ in range(8):
            self.owner_learns()
            self.list_is_due()
            self._deliver()
            self._pass(0.5)
        self._worker.set_load(
            running=tuple(
                line for line in self._worker.load.running if line.request_id not in self.ended
            )
        )
        self._pass(2.0)
        requests = self.runs, self.begins, self.waits, self.arrives
        names = [each.request_id for each in requests]
        assert [self.leader.has_request(name) for name in names] == [True] * len(names)
        assert not self.leader.has_request(self.ends.request_id), "it ended"
        begun = [self.begun[name] for name in (*names, self.ends.request_id)]
        assert begun == [0, 0, 1, 1, 0], f"{begun}: what runs was begun again, or what waits twice"
        aborted = {each.request_id for each in self.stage.aborts()}
        assert aborted <= self.ended, f"{aborted} were aborted"
        assert {each.request_id for each in self.stage.lost()} <= self.ended

    # What carries messages between the machines.

    def _pass(self, seconds: float) -> None:
        self.stage.pass_s(seconds)
        self._listen()

    def _listen(self) -> None:
        """Run what the leader admits, and answer what it asks for."""
        self.stage.listen()
        for admit in self.stage.admits():
            if held(admit.request_id, admit.attempt) not in self._worker.load.running:
                self.begun[admit.request_id] += 1
                line = held(admit.request_id, admit.attempt)
                self._worker.runs(*self._worker.load.running, line)
        for fetch in self.stage.of(FetchOpenList):
            self.stage.actions.remove(fetch)
            self._own(self.owner.open_list_requested(fetch))

    def _own(self, actions: Iterable[Action]) -> None:
        messages: list[OpenList | OpenListState] = []
        for action in actions:
            match action:
                case OpenList() | OpenListState():
                    messages.append(action)
                case SubmitRequest():
                    self._submit(action)
                case CancelRequest():
                    self._own(self.owner.cancel_answered(action.request_id, accepted=True))
                case _:
                    pass
        self._send(messages)

    def _send(self, messages: Sequence[OpenList | OpenListState]) -> None:
        for message in messages:
            self._sent += 1
            if self._sent == self._lost:
                break
            self._under_way.append(message)
        self._deliver()

    def _deliver(self) -> None:
        while len(self._under_way) > self._lag:
            self.leader.on_open_list(self._under_way.popleft())
            self._listen()

    def _submit(self, submit: SubmitRequest) -> None:
        answer: SubmitAccepted | EngineError
        if not self._learned:
            answer = SubmitAccepted(request_id=submit.request_id, term=OLD, position=0)
        else:
            try:
                answer = self.leader.submit(submit)
            except EngineError as error:
                answer = error
        self._own(self.owner.submit_answered(submit.request_id, answer))


ORDERS = tuple(itertools.permutations(EVENTS))
LAGS = range(4)
LOST = (None, *range(1, 17))
"""None, or the number of a message: about 15 are sent before the last event."""


def live(order: Sequence[str], *, lag: int, lost: int | None) -> None:
    """Let the events happen in this order."""
    world = SettleOrders(lag=lag, lost=lost)
    for event in order:
        getattr(world, event)()
    world.finish()


def live_numbered(number: int) -> None:
    """The order of a number, with another lag and another loss than that before it."""
    live(ORDERS[number], lag=LAGS[number % len(LAGS)], lost=LOST[number % len(LOST)])
