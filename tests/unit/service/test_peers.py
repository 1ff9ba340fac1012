"""Who counts as alive, on a clock that the test moves."""

from __future__ import annotations

import random

import pytest

from antiphon.service.peers import Change, Patience, Peer, Peers, Verdict
from antiphon.testing.clock import ManualClock
from antiphon.wire.base import Process, Role, State
from antiphon.wire.heartbeat import Heartbeat
from antiphon.wire.ids import Incarnation, InstanceId

BEAT_S = 0.5
DIGEST = "name:1,model:2"
PATIENCE = Patience(heartbeat_s=BEAT_S, suspect_beats=3, dead_beats=5)
US = Process(instance=InstanceId("scheduler-0"), incarnation=Incarnation("us"))


class World:
    """A table, and a broker that brings our own heartbeat back unless it is frozen."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.peers = Peers(US, DIGEST, self.clock, PATIENCE)
        self.changes: list[tuple[Change, str, str]] = []
        self.peers.watch(self._note)
        self.joins = 1
        self.up = True
        self.whole = True
        self.run(0)

    def beat(
        self,
        instance: str = "worker-0",
        incarnation: str = "1",
        *,
        state: State = State.READY,
        digest: str = DIGEST,
        wire_version: int = 1,
        late_s: float = 0,
    ) -> None:
        process = Process(instance=InstanceId(instance), incarnation=Incarnation(incarnation))
        self.hear(process, state, digest, wire_version, late_s)

    def hear(
        self,
        process: Process,
        state: State = State.READY,
        digest: str = DIGEST,
        wire_version: int = 1,
        late_s: float = 0,
    ) -> None:
        self.peers.hear(
            Heartbeat(
                role=Role.WORKER,
                process=process,
                state=state,
                config_digest=digest,
                wire_version=wire_version,
                health_port=0,
                load=0,
                not_after_unix_ms=self.clock.unix_ms() + round(1000 * (2.5 - late_s)),
            )
        )

    def run(self, seconds: float) -> None:
        """Let time pass in tenths of a second, with our own heartbeat each half."""
        for tenth in range(round(seconds * 10) + 1):
            if tenth:
                self.clock.advance(0.1)
            if self.up and self.whole and tenth % 5 == 0:
                self.hear(US)
            self.peers.judge(link_up=self.up, joins=self.joins)

    def verdict(self, instance: str = "worker-0") -> Verdict:
        peer = self.peers.find(InstanceId(instance))
        return Verdict.DEAD if peer is None else peer.verdict

    def news(self) -> list[tuple[Change, str]]:
        """What happened since the last question, without instances."""
        told = [(change, incarnation) for change, _, incarnation in self.changes]
        self.changes.clear()
        return told

    def _note(self, change: Change, peer: Peer) -> None:
        self.changes.append((change, peer.process.instance, peer.process.incarnation))


@pytest.fixture
def world() -> World:
    return World()


@pytest.mark.parametrize(
    ("silence_s", "verdict"),
    [(0, "alive"), (1.4, "alive"), (1.6, "suspect"), (2.4, "suspect"), (2.6, "dead")],
)
def test_silence_makes_suspect_then_dead(world: World, silence_s: float, verdict: str) -> None:
    world.beat()
    world.run(silence_s)
    assert world.verdict() == verdict


def test_each_change_is_told_once_and_in_order(world: World) -> None:
    world.beat()
    world.run(4)
    assert world.news() == [(Change.APPEARED, "1"), (Change.CHANGED, "1"), (Change.DIED, "1")]
    world.beat()
    assert world.news() == [(Change.APPEARED, "1")]  # it was frozen, not gone


def test_a_heartbeat_ends_suspicion(world: World) -> None:
    world.beat()
    world.run(2)
    assert not world.peers.working(Role.WORKER)
    world.beat()
    assert len(world.peers.working(Role.WORKER)) == 1


def test_a_draining_peer_is_listed_and_gets_no_work(world: World) -> None:
    world.beat(state=State.DRAINING)
    assert len(world.peers.of(Role.WORKER)) == 1
    assert not world.peers.working(Role.WORKER)


def test_a_new_life_is_the_death_of_the_old_one(world: World) -> None:
    world.beat(incarnation="1")
    old = world.peers.of(Role.WORKER)[0].process
    world.beat(incarnation="2")
    assert world.news() == [(Change.APPEARED, "1"), (Change.DIED, "1"), (Change.APPEARED, "2")]
    assert not world.peers.lives(old)


def test_a_late_heartbeat_of_a_replaced_life_does_not_bring_it_back(world: World) -> None:
    world.beat(incarnation="1")
    world.beat(incarnation="2")
    world.news()
    world.beat(incarnation="1")
    assert world.news() == []


@pytest.mark.parametrize("field", ["cluster.model", "wire_version", "not_after_unix_ms"])
def test_a_heartbeat_that_does_not_fit_is_refused_and_logged_once(
    world: World, field: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        match field:
            case "cluster.model":
                world.beat(digest="name:1,model:3")
            case "wire_version":
                world.beat(wire_version=2)
            case _:
                world.beat(late_s=3)
    assert world.peers.all() == []
    refused = [record for record in caplog.records if record.message == "peer refused"]
    assert [vars(record)["field"] for record in refused] == [field]


def test_while_the_link_is_down_nobody_dies_and_then_everybody_counts_as_heard(
    world: World,
) -> None:
    world.beat()
    world.up = False
    world.run(60)
    assert world.verdict() is Verdict.ALIVE
    world.up, world.joins = True, 2
    world.run(2.4)
    assert world.verdict() is Verdict.SUSPECT
    world.run(1)
    assert world.verdict() is Verdict.DEAD


def test_a_quick_rejoin_between_two_looks_resets_everybody(world: World) -> None:
    world.beat()
    world.run(2.4)
    world.joins = 2
    world.run(1)
    assert world.verdict() is not Verdict.DEAD


def test_a_frozen_broker_kills_nobody(world: World) -> None:
    """The link looks up, and nothing comes: not even our own heartbeat."""
    world.beat()
    world.run(1)
    world.whole = False
    world.run(30)
    assert world.verdict() is not Verdict.DEAD
    world.whole = True
    world.run(1)  # ours is back first; theirs may be right behind
    assert world.verdict() is not Verdict.DEAD
    world.run(3)
    assert world.verdict() is Verdict.DEAD


@pytest.mark.parametrize("seed", range(60))
def test_who_beats_on_a_whole_link_never_dies_and_who_is_silent_always_does(seed: int) -> None:
    """Processes, restarts, silences and outages drawn at random."""
    print(f"seed {seed}")
    dice, world = random.Random(seed), World()
    alive = {f"worker-{n}": 1 for n in range(4)}
    silent_s = dict.fromkeys(alive, 0.0)
    whole_s = 0.0
    for _ in range(600):
        act = dice.random()
        if act < 0.02:
            world.up = not world.up
            world.joins += world.up
        elif act < 0.04:
            world.whole = not world.whole
        elif act < 0.07:
            name = dice.choice(list(alive))
            alive[name] = 0 if alive[name] else len(world.changes) + 2
        good = world.up and world.whole
        for name, incarnation in alive.items():
            if incarnation and good:
                world.beat(name, str(incarnation))
                silent_s[name] = 0.0
            else:
                silent_s[name] += BEAT_S
        whole_s = whole_s + BEAT_S if good else 0.0
        world.run(BEAT_S)
        for name, incarnation in alive.items():
            if incarnation and whole_s > 0:
                assert world.verdict(name) is Verdict.ALIVE
            if not incarnation and min(silent_s[name], whole_s) > 4:
                assert world.verdict(name) is Verdict.DEAD
    listed = {peer.process.instance for peer in world.peers.all()}
    died = sum(change is Change.DIED for change, _, _ in world.changes)
    born = sum(change is Change.APPEARED for change, _, _ in world.changes)
    assert born - died == len(listed)


@pytest.mark.parametrize(("silence_s", "due_s"), [(0.3, 0.5), (1.2, 0.3), (1.5, 1.0), (2.2, 0.3)])
def test_a_verdict_is_due_when_silence_next_means_more(
    world: World, silence_s: float, due_s: float
) -> None:
    world.beat()
    world.run(silence_s)
    due = world.peers.judge(link_up=True, joins=1)
    assert due == pytest.approx(min(due_s, 0.5))


def test_a_verdict_that_is_due_is_drawn_in_time_and_few_others(world: World) -> None:
    world.run(0)  # the link is whole
    world.beat()
    began_s, looks = world.clock.now(), 0
    while True:
        world.hear(US)
        pause_s = world.peers.judge(link_up=True, joins=1)
        looks += 1
        if world.verdict() == "dead":
            break
        world.clock.advance(pause_s)
    assert 2.5 <= world.clock.now() - began_s < 2.53
    assert looks <= 8


def test_a_link_that_is_not_whole_is_looked_at_several_times_a_heartbeat(world: World) -> None:
    assert world.peers.judge(link_up=False, joins=1) == pytest.approx(BEAT_S / 5)
