"""Processes whose lists others follow, over a network that loses and reorders messages."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from tests.simulation.owner_world import ME, MODEL, submission
from tests.support.clock import ManualClock
from tests.support.worker import LEADER, WORKER, FakeEngine, admit

from antiphon.config.gateway import GatewayConfig
from antiphon.gateway.owner.machine import Owner
from antiphon.model_worker.batching.state import Finish
from antiphon.model_worker.protocol.worker_output import RunChoice, WorkerOutput
from antiphon.scheduler.cluster_view import WorkerAssignments, WorkerReport
from antiphon.service.followed_lists import OpenLists
from antiphon.service.sequence import SeqSender
from antiphon.wire.base import FinishReason, ProcessState, Role
from antiphon.wire.command import Abort, Command, CommandBatch
from antiphon.wire.heartbeat import (
    FetchRunningList,
    Heartbeat,
    RunningList,
    RunningListState,
    RunningRequest,
    WorkerLoad,
)
from antiphon.wire.ids import RequestId
from antiphon.wire.submit import FetchOpenList, OpenList, OpenListState

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from antiphon.gateway.owner.actions import Action
    from antiphon.model_worker.batching.state import ChoiceKey
    from antiphon.model_worker.protocol.worker_output import Action as WorkerAction
    from antiphon.wire.base import Message

PART_MAX = 5
"""Few requests a part: most whole lists have several."""
LOSS = 0.2
DISORDER = 0.1
BEAT_S = 0.5

Known = frozenset[tuple[object, ...]]
"""What is known of each request."""


class Follower(ABC):
    """One of those that follow a list, each with losses of its own.

    Attributes:
        known: What it last held to be all of the list.
        stale: Consecutive states after which its copy was not known to be complete.
    """

    def __init__(self) -> None:
        self.known: Known = frozenset()
        self.stale = 0

    @abstractmethod
    def receive(self, message: Message, now: float) -> Message | None:
        """Take in a message, and return a request for the whole list, if there is one."""


class ListWorld(ABC):
    def __init__(self, seed: int, followers: Sequence[Follower]) -> None:
        self.random = random.Random(seed)
        self.clock = ManualClock()
        self.followers = followers
        self.loss = LOSS
        self.disorder = DISORDER

    @abstractmethod
    def change(self) -> None: ...

    @abstractmethod
    def beat(self) -> None: ...

    @abstractmethod
    def fetched(self, fetch: Message) -> Sequence[Message]:
        """The messages with which a request for the whole list is answered."""

    @property
    @abstractmethod
    def listed(self) -> Known: ...

    def publish(self, messages: Sequence[Message]) -> None:
        fetches: list[Message] = []
        for follower in self.followers:
            arriving = [each for each in messages if self.random.random() >= self.loss]
            if self.random.random() < self.disorder:
                self.random.shuffle(arriving)
            for message in arriving:
                fetch = follower.receive(message, self.clock.now())
                fetches += [] if fetch is None else [fetch]
        for fetch in fetches:
            if self.random.random() >= self.loss:
                self.publish(self.fetched(fetch))

    def check(self) -> None:
        """Two beats without loss make every copy whole, and nothing else is taken for whole."""
        self.loss = self.disorder = 0.0
        self.beat()
        self.beat()
        self.loss, self.disorder = LOSS, DISORDER
        for follower in self.followers:
            assert follower.stale == 0, "a lost change was not made up for in two beats"
            assert follower.known == self.listed, "an incomplete copy was taken for complete"


# A gateway and those that follow its open list.


class OpenFollower(Follower):
    def __init__(self) -> None:
        super().__init__()
        self.lists = OpenLists()

    def receive(self, message: Message, now: float) -> FetchOpenList | None:
        assert isinstance(message, OpenList | OpenListState)
        if (change := self.lists.apply(message, now)) is None:
            return None
        if change.lines is not None:
            self.known, self.stale = frozenset((name,) for name in change.lines), 0
        elif change.torn:
            self.stale += 1
            return FetchOpenList(gateway=message.owner)
        return None


class OpenListWorld(ListWorld):
    def __init__(self, seed: int) -> None:
        super().__init__(seed, [OpenFollower(), OpenFollower()])
        self.owner = Owner(ME, MODEL, self.clock, GatewayConfig(), list_part_max=PART_MAX)
        self.open: set[RequestId] = set()
        self._count = 0

    @property
    def listed(self) -> Known:
        return frozenset((name,) for name in self.open)

    def change(self) -> None:
        """A request comes, or one ends."""
        if self.open and self.random.random() < 0.4:
            ended = self.random.choice(sorted(self.open))
            self.open.remove(ended)
            self.publish(_of_list(self.owner.cancel(ended)))
        else:
            self._count += 1
            request_id = RequestId(f"r{self._count}")
            self.open.add(request_id)
            opened = self.owner.open(submission(request_id, self.clock, 1e6))
            self.publish(_of_list(opened))

    def beat(self) -> None:
        self.clock.advance(BEAT_S)
        self.publish(_of_list(self.owner.tick()))

    def fetched(self, fetch: Message) -> Sequence[Message]:
        assert isinstance(fetch, FetchOpenList)
        return _of_list(self.owner.open_list_requested(fetch))


def _of_list(actions: Iterable[Action]) -> list[Message]:
    return [each for each in actions if isinstance(each, OpenList | OpenListState)]


# A worker and the schedulers that follow its running list.


class RunningFollower(Follower):
    """A scheduler. `sent` is what the worker held as of each version."""

    def __init__(self, sent: dict[int, Known]) -> None:
        super().__init__()
        self.assignments = WorkerAssignments()
        self._sent = sent

    def receive(self, message: Message, now: float) -> FetchRunningList | None:
        if isinstance(message, RunningList):
            self._note(self.assignments.apply_list(message, now))
            return None
        assert isinstance(message, Heartbeat)
        assert message.worker is not None
        self.stale += 1
        self._note(self.assignments.apply(message, message.worker, now))
        return next(iter(self.assignments.take_fetches()), None)

    def _note(self, report: WorkerReport | None) -> None:
        if report is not None:
            self.known, self.stale = _known(report.lines), 0
            listed = report.beat.worker and report.beat.worker.listed
            assert listed is not None
            assert self.known == self._sent[listed.version], "a report is of another heartbeat"


class RunningListWorld(ListWorld):
    def __init__(self, seed: int) -> None:
        self.sent: dict[int, Known] = {}
        super().__init__(seed, [RunningFollower(self.sent), RunningFollower(self.sent)])
        self.output = WorkerOutput(WORKER, SeqSender(), live_max=1000, list_part_max=PART_MAX)
        self.engine = FakeEngine()
        self.keys: dict[RequestId, ChoiceKey] = {}
        self._count = 0
        self._commands = 0

    @property
    def listed(self) -> Known:
        return _known(self.output.held())

    def change(self) -> None:
        """A request is admitted, is generated further, ends, is moved or is aborted."""
        draw, held = self.random.random(), sorted(self.output.held(), key=lambda x: x.request_id)
        if not held or draw < 0.4:
            self._count += 1
            self._command(admit(f"r{self._count}", self._count))
            return
        line = self.random.choice(held)
        key = self.keys[line.request_id]
        if draw < 0.6:
            self._command(Abort(request_id=line.request_id, attempt=line.attempt))
        elif draw < 0.7:  # it may be in a list's changes as both, closed and opened
            self._command(Abort(request_id=line.request_id, attempt=line.attempt))
            self._count += 1
            self._command(admit(str(line.request_id), self._count))
        elif not line.ended:
            self.output.started([key])
            last = draw > 0.9
            finish = Finish(reason=FinishReason.LENGTH) if last else None
            ids = [7] * self.random.choice([1, 1, 3])
            self.output.step(1, [self.engine.progress(key, ids, finish)])

    def beat(self) -> None:
        self.clock.advance(BEAT_S)
        self.publish(self._beat())

    def fetched(self, fetch: Message) -> Sequence[Message]:
        assert isinstance(fetch, FetchRunningList)
        now_ms = round(self.clock.now() * 1000)
        parts = self.output.list_requested(fetch, now_ms)
        return [*parts, *self._beat()] if parts else []

    def _beat(self) -> list[Message]:
        listed, changes = self.output.list_changes()
        self.sent[listed.version] = self.listed
        return [*changes, heartbeat(listed)]

    def _command(self, *commands: Command) -> None:
        self._commands += 1
        batch = CommandBatch(
            leader=LEADER,
            worker=WORKER,
            seq=self._commands,
            commands=commands,
            not_after_unix_ms=2**50,
        )
        self._act(self.output.command(batch, 0))

    def _act(self, actions: Iterable[WorkerAction]) -> None:
        for action in actions:
            if isinstance(action, RunChoice):
                self.keys[action.state.request_id] = action.key


def _known(lines: Iterable[RunningRequest]) -> Known:
    """All but how many tokens, of which lists have an estimate."""
    return frozenset((line.request_id, line.attempt.n, line.waiting, line.ended) for line in lines)


def heartbeat(listed: RunningListState) -> Heartbeat:
    load = WorkerLoad(
        pages_free=1,
        pages_total=1,
        page_tokens=16,
        running_max=8,
        step=0,
        step_age_s=0.0,
        context_tokens=64,
        listed=listed,
    )
    return Heartbeat(
        role=Role.WORKER,
        process=WORKER,
        state=ProcessState.READY,
        config_digest="digest",
        health_port=0,
        load=0,
        worker=load,
        not_after_unix_ms=2**50,
    )


def _live(world: ListWorld) -> None:
    for _ in range(20):
        for _ in range(world.random.randint(0, 12)):
            world.change()
        world.beat()
        if world.random.random() < 0.3:
            world.check()
    world.check()


def open_lists(seed: int) -> None:
    _live(OpenListWorld(seed))


def running_lists(seed: int) -> None:
    _live(RunningListWorld(seed))
