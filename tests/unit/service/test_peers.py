"""Who counts as alive, on a clock that the test moves."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.support.clock import ManualClock
from tests.support.services import process

from antiphon.service.peers import Liveness, LivenessConfig, Peer, PeerChange, PeerTable
from antiphon.wire.base import Process, ProcessState, Role
from antiphon.wire.heartbeat import Heartbeat
from antiphon.wire.ids import InstanceId

BEAT_S = 0.5
DIGEST = "name:1,model:2"
PATIENCE = LivenessConfig(heartbeat_s=BEAT_S, suspect_beats=3, dead_beats=5, owner_s=15.0)
US = process("scheduler-0", "us")


class World:
    """A table, and a broker that brings our own heartbeat back unless it is frozen."""

    def __init__(self, *, joined: bool = True) -> None:
        self.clock = ManualClock()
        self.peers = PeerTable(US, DIGEST, self.clock, PATIENCE)
        self.changes: list[tuple[PeerChange, str, str]] = []
        self.peers.watch(self._note)
        self.joins = 1
        self.up = True
        self.whole = True
        if joined:
            self.run(0)

    def beat(
        self,
        instance: str = "worker-0",
        incarnation: str = "1",
        *,
        late_s: float = 0,
        ahead_s: float = 0,
        **fields: Any,
    ) -> None:
        """Receive a heartbeat: of a worker that is ready, where `fields` do not say otherwise."""
        sent_ms = self.clock.unix_ms() + round(1000 * (ahead_s - late_s))
        usual = {"role": Role.WORKER, "state": ProcessState.READY, "config_digest": DIGEST}
        self.peers.on_heartbeat(
            Heartbeat(
                process=process(instance, incarnation),
                health_port=0,
                load=0,
                sent_unix_ms=sent_ms,
                not_after_unix_ms=sent_ms + 2500,
                **usual | fields,
            )
        )

    def run(self, seconds: float) -> None:
        """Let time pass in tenths of a second, with our own heartbeat each half."""
        for tenth in range(round(seconds * 10) + 1):
            if tenth:
                self.clock.advance(0.1)
            if self.up and self.whole and tenth % 5 == 0:
                self.beat(US.instance, US.incarnation)
            self.peers.update_liveness(link_up=self.up, connect_count=self.joins)

    def verdict(self, instance: str = "worker-0") -> Liveness:
        peer = self.peers.find(InstanceId(instance))
        return Liveness.DEAD if peer is None else peer.liveness

    def news(self) -> list[tuple[PeerChange, str]]:
        """What happened since the last question, without instances."""
        changes = [(change, incarnation) for change, _, incarnation in self.changes]
        self.changes.clear()
        return changes

    def died(self) -> list[str]:
        """The lives that ended since the last question."""
        return [life for change, life in self.news() if change is PeerChange.DIED]

    def _note(self, change: PeerChange, peer: Peer) -> None:
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


def test_exit_makes_dead_at_once_and_only_the_process_that_it_names(world: World) -> None:
    world.beat(incarnation="1")
    world.peers.on_exit(process("worker-0", "0"))
    assert world.died() == []
    world.peers.on_exit(process("worker-0", "1"))
    assert (world.died(), world.verdict()) == (["1"], "dead")
    world.beat(incarnation="2")
    assert world.verdict() == "alive"


def test_exit_that_was_not_true_is_corrected_by_the_next_heartbeat(world: World) -> None:
    world.beat()
    world.peers.on_exit(process("worker-0", "1"))
    world.run(0.5)
    world.beat()
    assert world.news() == [(change, "1") for change in ("appeared", "died", "appeared")]


def test_heartbeat_sent_before_an_exit_does_not_bring_a_peer_back(world: World) -> None:
    """It was overtaken by the notice. The peer's clock is ahead."""
    world.beat(ahead_s=2)
    world.run(0.5)
    world.peers.on_exit(process("worker-0", "1"))
    world.beat(ahead_s=2, late_s=0.1)
    assert world.verdict() == "dead"
    world.run(0.5)
    world.beat(ahead_s=2)
    assert world.verdict() == "alive"


def late(world: World) -> list[str]:
    return [peer.process.instance for peer in world.peers.take_late()]


def test_a_late_peer_is_probed_once_an_interval(world: World) -> None:
    world.beat()
    world.run(0.9)
    assert late(world) == []
    world.run(0.2)
    assert [late(world), late(world)] == [["worker-0"], []]
    world.run(BEAT_S)
    assert late(world) == ["worker-0"]
    world.beat()
    world.run(BEAT_S)
    assert late(world) == []


def test_the_next_look_is_when_a_peer_becomes_late(world: World) -> None:
    world.beat()
    world.run(0.8)
    world.beat(US.instance, US.incarnation)
    assert world.peers.update_liveness(link_up=True, connect_count=1) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("holder", "verdict"),
    [(None, "dead"), (process("worker-0", "2"), "dead"), (process("worker-0", "1"), "alive")],
    ids=["none", "another", "itself"],
)
def test_a_late_peer_is_dead_unless_it_holds_its_name(
    world: World, holder: Process | None, verdict: str
) -> None:
    world.beat()
    world.run(1.1)
    (peer,) = world.peers.take_late()
    world.peers.on_probed(peer, holder)
    assert world.verdict() == verdict


def test_a_late_peer_that_has_sent_a_heartbeat_since_it_was_probed_lives(world: World) -> None:
    """It had lost its connection, and its first heartbeat overtakes the broker's answer."""
    world.beat()
    world.run(1.1)
    (peer,) = world.peers.take_late()
    world.beat()
    world.peers.on_probed(peer, None)
    assert world.verdict() == "alive"


def test_gateways_are_not_probed_and_no_one_is_over_a_broken_link(world: World) -> None:
    """A gateway has its lease; and one that has just connected again has received nothing yet."""
    world.beat("gateway-0", role=Role.GATEWAY)
    world.run(2)
    assert late(world) == []
    world.beat()
    world.up = False
    world.run(3)
    assert late(world) == []
    world.up, world.joins = True, 2
    world.run(1.4)  # our heartbeat comes back after half a second
    assert late(world) == []
    world.run(0.2)
    assert late(world) == ["worker-0"]


def test_watchers_get_each_change_once_and_in_order(world: World) -> None:
    world.beat()
    world.run(4)
    assert world.news() == [
        (PeerChange.APPEARED, "1"),
        (PeerChange.CHANGED, "1"),
        (PeerChange.DIED, "1"),
    ]
    world.beat()
    assert world.news() == [(PeerChange.APPEARED, "1")]  # it was frozen, not gone


def test_suspects_and_draining_peers_get_no_work(world: World) -> None:
    world.beat()
    world.run(2)
    assert not world.peers.accepting_work(Role.WORKER)
    world.beat()
    assert len(world.peers.accepting_work(Role.WORKER)) == 1
    world.beat(state=ProcessState.DRAINING)
    assert len(world.peers.with_role(Role.WORKER)) == 1
    assert not world.peers.accepting_work(Role.WORKER)


def test_name_passes_to_a_new_life_once_the_old_one_is_silent(world: World) -> None:
    """A process is killed and started again at once: within three heartbeats it counts."""
    world.beat(incarnation="1")
    old = world.peers.with_role(Role.WORKER)[0].process
    for _ in range(3):
        world.beat(incarnation="2")
        assert world.peers.is_alive(old)
        world.run(BEAT_S)
    world.beat(incarnation="2")
    assert [change for change in world.news() if change[0] is not PeerChange.CHANGED] == [
        (PeerChange.APPEARED, "1"),
        (PeerChange.DIED, "1"),
        (PeerChange.APPEARED, "2"),
    ]
    assert not world.peers.is_alive(old)


def test_name_stays_with_a_live_process(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """A second process of the name, and heartbeats that are forged, each with another life."""
    for turn in range(40):
        world.beat(incarnation="true")
        world.beat(incarnation="second")
        world.beat(incarnation=f"forged {turn}")
        world.run(BEAT_S)
    assert {incarnation for _, incarnation in world.news()} == {"true"}
    lines = map(vars, caplog.records)
    (line,) = [line for line in lines if line.get("incarnation") == "second"]
    assert (line["field"], line["reason"]) == ("instance", "a live process has this name")


def test_name_returns_to_a_process_whose_successor_is_silent(world: World) -> None:
    """A heartbeat was forged while the true process was frozen for a moment."""
    world.beat(incarnation="true")
    world.run(1.6)
    world.beat(incarnation="forged")
    assert world.died() == ["true"]
    for _ in range(4):
        world.beat(incarnation="true")
        world.run(BEAT_S)
    (found,) = world.peers.all()
    assert found.process == process("worker-0", "true")
    assert world.died() == ["forged"]


def test_peers_do_not_take_back_an_earlier_life_by_a_stale_heartbeat(world: World) -> None:
    """It was sent before the process died, and comes when its successor is silent, too."""
    world.beat(incarnation="1")
    world.run(1.6)
    world.beat(incarnation="2")
    world.run(1.6)
    world.news()
    world.beat(incarnation="1", late_s=3.2)
    assert world.news() == []


@pytest.mark.parametrize(
    ("state", "silence_s", "verdict"),
    [
        (ProcessState.READY, 1.6, "suspect"),
        (ProcessState.READY, 14.8, "suspect"),
        (ProcessState.READY, 15.1, "dead"),
        (ProcessState.DRAINING, 2.6, "dead"),  # it has taken its leave
    ],
)
def test_gateway_may_be_silent_for_longer(
    world: World, state: ProcessState, silence_s: float, verdict: str
) -> None:
    """What it owns runs on while it pauses."""
    world.beat("gateway-0", role=Role.GATEWAY, state=state)
    world.run(silence_s)
    assert world.verdict("gateway-0") == verdict


def test_gateways_next_life_ends_the_silence_of_the_last(world: World) -> None:
    world.beat("gateway-0", "1", role=Role.GATEWAY)
    world.run(2)
    world.beat("gateway-0", "2", role=Role.GATEWAY)
    assert world.died() == ["1"]


def test_peers_record_a_process_that_took_our_name_while_we_were_silent(world: World) -> None:
    ours = {"instance": US.instance, "incarnation": "another"}
    world.run(1)
    world.beat(**ours)
    assert world.peers.take_name_conflict() is None  # we were there first
    world.clock.advance(4)  # frozen
    world.beat(**ours)
    assert world.peers.take_name_conflict() == process(US.instance, "another")
    assert world.peers.take_name_conflict() is None
    world.run(1)
    world.beat(**ours)
    assert world.peers.take_name_conflict(), "our own heartbeat came back first"
    world.run(4)
    world.beat(**ours)
    assert world.peers.take_name_conflict() is None
    assert world.peers.all() == [], "a process is not its own peer"


def test_peers_record_a_process_with_our_name_before_our_first_heartbeat() -> None:
    world = World(joined=False)
    world.beat(US.instance, "elder")
    assert world.peers.take_name_conflict() is not None


@pytest.mark.parametrize(("late_s", "yields"), [(6.0, True), (0.2, False)])
def test_a_process_that_froze_before_its_first_heartbeat_came_back_may_have_lost_its_name(
    late_s: float, *, yields: bool
) -> None:
    world = World(joined=False)
    world.beat(US.instance, US.incarnation, late_s=late_s)
    world.beat(US.instance, "another")
    assert bool(world.peers.take_name_conflict()) == yields


@pytest.mark.parametrize("ahead_s", [1.5, 2.5, -2.5, 4.9, -4.9])
def test_peers_measure_how_far_a_clock_is_from_ours(world: World, ahead_s: float) -> None:
    for turn in range(20):
        world.beat(ahead_s=ahead_s, late_s=0.25 if turn % 2 else 0.01)  # late: the way was long
        world.run(BEAT_S)
    (peer,) = world.peers.all()
    assert peer.liveness is Liveness.ALIVE
    assert world.peers.offset_ms(peer.process) == round(-1000 * ahead_s) + 10
    assert (world.peers.offset_ms(process("worker-1")), world.peers.offset_ms(US)) == (None, 0)


@pytest.mark.parametrize("ahead_s", [6.0, -6.0])
def test_peers_refuse_a_clock_that_is_too_far_from_ours(
    world: World, ahead_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    counts: list[str] = []
    world.peers.on_reject(counts.append)
    for _ in range(5):
        world.beat(ahead_s=ahead_s)
    assert world.peers.all() == []
    assert counts == ["clock"] * 5
    (line,) = [vars(record) for record in caplog.records if record.message == "peer refused"]
    expected = {"field": "clock", "clock_offset_s": -ahead_s, "clock_offset_max_s": 5.0}
    assert expected.items() <= line.items()


def test_peers_follow_a_clock_that_is_set(world: World) -> None:
    """It is an hour off for a while: refused for that while, then as good as any."""
    world.beat()
    for ahead_s in (3600.0, 0.0):
        for _ in range(20):
            world.beat(ahead_s=ahead_s)
            world.run(BEAT_S)
        assert world.verdict() is (Liveness.DEAD if ahead_s else Liveness.ALIVE)


@pytest.mark.parametrize("step_s", [4.0, -4.0])
def test_peers_outlive_a_step_of_our_own_clock(world: World, step_s: float) -> None:
    names = ("worker-0", "worker-1")
    for ahead_s in (0.0, -step_s):  # what is set is our clock: all others seem to be off at once
        for _ in range(20):
            for name in names:
                world.beat(name, ahead_s=ahead_s)
            world.run(BEAT_S)
    assert world.died() == []
    assert len(world.peers.accepting_work(Role.WORKER)) == len(names)


def test_forged_times_in_its_name_do_not_shut_a_process_out(world: World) -> None:
    for ahead_s in (10.0**6, 4.9, -4.9):
        world.beat()
        world.run(BEAT_S)
        world.beat(ahead_s=ahead_s)
        for _ in range(6):
            world.beat()
            world.run(BEAT_S)
        assert world.peers.accepting_work(Role.WORKER)
    assert world.died() == []


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("cluster.model", {"config_digest": "name:1,model:3"}),
        ("wire_version", {"wire_version": 2}),
        ("not_after_unix_ms", {"late_s": 3}),
    ],
)
def test_heartbeat_that_does_not_fit_is_refused_and_logged_once(
    world: World, field: str, change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        if "late_s" in change:  # it is late beside one that was on time
            world.beat()
        world.beat(**change)
        world.run(3)
    assert world.peers.all() == []
    refused = [record for record in caplog.records if record.message == "peer refused"]
    assert [vars(record)["field"] for record in refused] == [field]


def test_peers_stay_alive_while_the_link_is_down_and_count_as_received_after(world: World) -> None:
    world.beat()
    world.up = False
    world.run(60)
    assert world.verdict() is Liveness.ALIVE
    world.up, world.joins = True, 2
    world.run(2.4)
    assert world.verdict() is Liveness.SUSPECT
    world.run(1)
    assert world.verdict() is Liveness.DEAD


def test_quick_reconnect_between_two_updates_resets_all_peers(world: World) -> None:
    world.beat()
    world.run(2.4)
    world.joins = 2
    world.run(1)
    assert world.verdict() is not Liveness.DEAD


def test_frozen_broker_makes_no_peer_dead(world: World) -> None:
    """The link looks up, and nothing comes: not even our own heartbeat."""
    world.beat()
    world.run(1)
    world.whole = False
    world.run(30)
    assert world.verdict() is not Liveness.DEAD
    world.whole = True
    world.run(1)  # ours is back first; theirs may be right behind
    assert world.verdict() is not Liveness.DEAD
    world.run(3)
    assert world.verdict() is Liveness.DEAD


def test_a_process_that_receives_nothing_counts_as_silent_however_often_it_sends(
    world: World,
) -> None:
    world.beat()
    for unechoed_ms in (0, 0, 1000, 1500, 2000):  # the first of these went astray
        world.run(0.5)
        world.beat(unechoed_ms=unechoed_ms)
    assert world.verdict() is Liveness.SUSPECT
    world.run(0.5)
    world.beat(unechoed_ms=2500)
    assert world.verdict() is Liveness.DEAD
    world.beat()
    assert world.verdict() is Liveness.ALIVE


def test_a_heartbeat_counts_how_long_ours_have_not_come_back() -> None:
    world = World()
    ours, table = (US.instance, US.incarnation), world.peers

    def send(count: int = 1, *, echoed: bool) -> list[int]:
        sent = list[int]()
        for _ in range(count):
            world.clock.advance(BEAT_S)
            sent.append(table.count_sent(world.joins))
            if echoed:
                world.beat(*ours)
        return sent

    assert send(3, echoed=True) == [0, 0, 0]
    assert send(4, echoed=False) == [0, 1000, 1500, 2000]
    assert send(2, echoed=True) == [2500, 0]
    world.clock.advance(60)  # frozen
    assert send(3, echoed=False) == [0, 1000, 1500]
    world.joins += 1
    assert send(3, echoed=False) == [0, 0, 1000]


@pytest.mark.parametrize("seed", range(10))
def test_a_broker_that_stands_still_makes_no_process_seem_to_receive_nothing(seed: int) -> None:
    """Heartbeats sent meanwhile come all at once, in any order of their senders."""
    chance = random.Random(seed)
    clock, names = ManualClock(), ("scheduler-0", "scheduler-1", "scheduler-2")
    tables = [PeerTable(process(name, "1"), DIGEST, clock, PATIENCE) for name in names]
    held: list[list[Heartbeat]] = [[] for _ in names]

    def deliver() -> None:
        for queue in chance.sample(held, len(held)):
            beats, queue[:] = queue[:], []
            for beat in beats:
                for table in tables:
                    table.on_heartbeat(beat)
                    table.update_liveness(link_up=True, connect_count=1)

    frozen_from = chance.uniform(2, 3)
    frozen_until = frozen_from + chance.uniform(0, 12)
    flagged = False
    for tick in range(200):
        clock.advance(0.1)
        for at, table in enumerate(tables):
            if tick % 5 == at:
                beat = Heartbeat(
                    role=Role.SCHEDULER,
                    process=process(names[at], "1"),
                    state=ProcessState.READY,
                    config_digest=DIGEST,
                    health_port=0,
                    load=0,
                    sent_unix_ms=clock.unix_ms(),
                    not_after_unix_ms=clock.unix_ms() + 2500,
                    unechoed_ms=table.count_sent(1),
                )
                flagged |= beat.unechoed_ms > 0
                held[at].append(beat)
        if not frozen_from <= tick / 10 < frozen_until:
            deliver()
        for table in tables:
            table.update_liveness(link_up=True, connect_count=1)
            if tick > 10:
                assert [peer.liveness for peer in table.all()] == [Liveness.ALIVE] * 2
    assert flagged or frozen_until - frozen_from < 2


@pytest.mark.parametrize("seed", range(60))
def test_peers_with_heartbeats_never_die_and_silent_ones_always_do(seed: int) -> None:
    """Processes, restarts, silences and outages drawn at random."""
    print(f"seed {seed}")
    dice, world = random.Random(seed), World()
    alive = {f"worker-{n}": 1 for n in range(4)}
    silent_s = dict.fromkeys(alive, 0.0)
    heard_s = dict.fromkeys(alive, 0.0)
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
                heard_s[name] += BEAT_S
            else:
                silent_s[name] += BEAT_S
                heard_s[name] = 0.0
        whole_s = whole_s + BEAT_S if good else 0.0
        world.run(BEAT_S)
        for name, incarnation in alive.items():
            # A life that comes at once after another has its name when that one is suspect.
            if incarnation and heard_s[name] > 2.5:
                found = world.peers.find(InstanceId(name))
                assert found is not None
                assert (found.process.incarnation, found.liveness) == (str(incarnation), "alive")
            if not incarnation and min(silent_s[name], whole_s) > 4:
                assert world.verdict(name) is Liveness.DEAD
    listed = {peer.process.instance for peer in world.peers.all()}
    died = sum(change is PeerChange.DIED for change, _, _ in world.changes)
    born = sum(change is PeerChange.APPEARED for change, _, _ in world.changes)
    assert born - died == len(listed)


@pytest.mark.parametrize(("silence_s", "due_s"), [(0.3, 0.5), (1.2, 0.3), (1.5, 0.1), (2.2, 0.3)])
def test_verdict_or_probe_is_due_when_silence_counts_more(
    world: World, silence_s: float, due_s: float
) -> None:
    world.beat()
    world.run(silence_s)
    due = world.peers.update_liveness(link_up=True, connect_count=1)
    assert due == pytest.approx(min(due_s, 0.5))


def test_verdict_that_is_due_is_drawn_in_time_and_few_others(world: World) -> None:
    world.run(0)  # the link is whole
    world.beat()
    began_s, looks = world.clock.now(), 0
    while True:
        world.beat(US.instance, US.incarnation)
        pause_s = world.peers.update_liveness(link_up=True, connect_count=1)
        looks += 1
        if world.verdict() == "dead":
            break
        world.clock.advance(pause_s)
    assert 2.5 <= world.clock.now() - began_s < 2.53
    assert looks <= 8


def test_link_that_is_not_whole_is_looked_at_several_times_a_heartbeat(world: World) -> None:
    assert world.peers.update_liveness(link_up=False, connect_count=1) == pytest.approx(BEAT_S / 5)
