"""Following the events of workers, some of which get lost."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from tests.support.worker import blocks_removed, blocks_stored
from tests.unit.scheduler.stage import process

from antiphon.model_worker.protocol.kv_events import KvEventPublisher
from antiphon.scheduler.worker_caches import FULL_REPLAY_RETRY_S, REPLAY_RETRY_S, WorkerCaches
from antiphon.wire.digests import DIGEST_BYTES
from antiphon.wire.kv_events import BlocksCleared, BlocksStored, KvEvents, ReplayKv

if TYPE_CHECKING:
    from antiphon.wire.base import Process

W = process("worker-0")
ROOT = b"r" * DIGEST_BYTES


def block(number: int) -> bytes:
    return number.to_bytes(DIGEST_BYTES)


def chain(*numbers: int) -> bytes:
    return b"".join(map(block, numbers))


def stored_event(seq: int, *numbers: int, worker: Process = W) -> KvEvents:
    """One event, of blocks that follow each other."""
    digests = chain(*numbers)
    return KvEvents(worker=worker, seq=seq, events=(BlocksStored(parent=ROOT, digests=digests),))


def followed() -> WorkerCaches:
    """Caches that follow the worker from its start."""
    caches = WorkerCaches(100)
    caches.on_heartbeat(W, 0)
    return caches


def test_events_that_follow_each_other_need_no_replay() -> None:
    caches = followed()
    caches.apply_events(stored_event(1, 1, 2))
    caches.apply_events(stored_event(2, 3))
    assert caches.overlaps(chain(1, 2, 3)) == {W: 3}
    assert caches.due_replays(0.0) == []


def test_events_of_a_life_that_no_heartbeat_has_named_are_passed_over() -> None:
    caches = WorkerCaches(100)
    caches.apply_events(stored_event(1, 1))
    assert caches.blocks == 0


def test_worker_without_events_has_no_expected_blocks() -> None:
    caches = WorkerCaches(100)
    caches.on_heartbeat(W, None)
    caches.expect(W, block(1), 0.0)
    assert caches.blocks == 0
    assert caches.due_replays(0.0) == []


def test_gap_is_requested_once_and_again_without_an_answer() -> None:
    caches = followed()
    caches.apply_events(stored_event(1, 1))
    caches.apply_events(stored_event(3, 3))
    assert caches.overlaps(block(3)) == {}
    assert caches.due_replays(0.0) == [(W, ReplayKv(after=1))]
    assert caches.due_replays(0.5 * REPLAY_RETRY_S) == []
    assert caches.due_replays(REPLAY_RETRY_S) == [(W, ReplayKv(after=1))]


def test_a_lost_tail_shows_when_the_next_heartbeat_finds_it_missing_still() -> None:
    caches = followed()
    caches.on_heartbeat(W, 1)  # the event may be behind it
    assert caches.due_replays(0.0) == []
    caches.on_heartbeat(W, 1)
    assert caches.due_replays(0.0) == [(W, ReplayKv(after=0))]


def test_late_follower_requests_everything() -> None:
    announcer = KvEventPublisher(W, 10)
    announcer.add([blocks_stored(ROOT, (block(1), block(2)))])
    caches = WorkerCaches(100)
    caches.on_heartbeat(W, announcer.seq)
    ((worker, ask),) = caches.due_replays(0.0)
    caches.apply_replay(worker, announcer.replay(ask))
    assert caches.overlaps(chain(1, 2)) == {W: 2}
    assert caches.due_replays(9.0) == []


def test_a_dead_worker_is_forgotten_and_its_next_life_begins_with_nothing() -> None:
    caches = followed()
    caches.apply_events(stored_event(1, 1))
    caches.forget(W)
    assert caches.blocks == 0
    again = process("worker-0", life=2)
    caches.on_heartbeat(again, 0)
    caches.apply_events(stored_event(2, 2))  # of the life before
    assert caches.blocks == 0
    caches.apply_events(stored_event(1, 5, worker=again))
    assert caches.overlaps(block(5)) == {again: 1}


def test_an_answer_of_another_life_changes_nothing() -> None:
    caches = WorkerCaches(100)
    again = process("worker-0", life=2)
    caches.on_heartbeat(again, 3)
    ((_, ask),) = caches.due_replays(0.0)
    announcer = KvEventPublisher(W, 10)
    announcer.add([blocks_stored(ROOT, (block(1),))])
    caches.apply_replay(again, announcer.replay(ask))
    assert caches.blocks == 0


def stored(announcer: KvEventPublisher, *chain: int) -> None:
    announcer.add([blocks_stored(ROOT, tuple(map(block, chain)))])


def read(caches: WorkerCaches, announcer: KvEventPublisher, now: float) -> int:
    """Answer what is asked for at a time; return how many replays that took."""
    count = 0
    while asks := caches.due_replays(now):
        for worker, ask in asks:
            count += 1
            caches.apply_replay(worker, announcer.replay(ask))
    return count


def follow(caches: WorkerCaches, announcer: KvEventPublisher) -> None:
    for message in announcer.take():
        caches.apply_events(message)


def test_blocks_evicted_at_the_bound_are_asked_for_again_when_there_is_room() -> None:
    announcer, caches = KvEventPublisher(W, 100), WorkerCaches(16)
    caches.on_heartbeat(W, 0)
    stored(announcer, *range(10))
    stored(announcer, *range(100, 110))
    follow(caches, announcer)
    assert caches.blocks == 16
    first = chain(*range(10))
    assert caches.overlaps(first) == {W: 6}
    assert read(caches, announcer, 1.0) == 0, "there is no room yet"
    announcer.add([blocks_removed(tuple(map(block, range(100, 110))))])
    follow(caches, announcer)
    assert read(caches, announcer, 2.0) == 1
    assert caches.overlaps(first) == {W: 10}
    assert read(caches, announcer, 2.0 + 10 * FULL_REPLAY_RETRY_S) == 0, (
        "nothing is missing any more"
    )


def test_blocks_evicted_at_the_bound_cause_no_storm_of_dumps() -> None:
    """A worker whose cache goes up and down around the bound is dumped once in a while."""
    announcer, caches = KvEventPublisher(W, 100_000), WorkerCaches(16)
    caches.on_heartbeat(W, 0)
    stored(announcer, *range(10))
    dumps = 0
    for turn in range(600):
        extra = tuple(map(block, range(1000 + 20 * turn, 1010 + 20 * turn)))
        announcer.add([blocks_stored(ROOT, extra), blocks_removed(extra)])
        follow(caches, announcer)
        dumps += read(caches, announcer, turn / 10)
    assert 1 <= dumps <= 60 / FULL_REPLAY_RETRY_S + 1
    assert caches.overlaps(chain(*range(10))) == {W: 6}


def test_partial_workers_are_dumped_one_at_a_time_and_again_when_the_reply_is_lost() -> None:
    caches = WorkerCaches(16)
    workers = [process(f"worker-{number}") for number in range(2)]
    announcers = {worker: KvEventPublisher(worker, 100) for worker in workers}
    for number, worker in enumerate(workers):
        caches.on_heartbeat(worker, 0)
        stored(announcers[worker], *range(100 * number, 100 * number + 12))
        follow(caches, announcers[worker])
    assert caches.due_replays(1.0) == []
    for number, worker in enumerate(workers):
        gone = range(100 * number + 4, 100 * number + 12)
        announcers[worker].add([blocks_removed(tuple(map(block, gone)))])
        follow(caches, announcers[worker])
    ((first, ask),) = caches.due_replays(2.0)
    assert ask.after == -1
    assert caches.due_replays(2.5) == []
    assert caches.due_replays(2.0 + REPLAY_RETRY_S) == [(first, ask)], "the reply was lost"
    caches.apply_replay(first, announcers[first].replay(ask))
    ((second, _),) = caches.due_replays(4.0)
    assert second != first


class World:
    """Workers whose messages get lost, and calls that are not answered; a tick is 0.1 s."""

    def __init__(self, seed: int, blocks_max: int = 1_000_000) -> None:
        self.random = random.Random(seed)
        self.caches = WorkerCaches(blocks_max)
        self.now = 0.0
        self.lives = 0
        self.loss = 0.3
        self.workers: dict[Process, tuple[KvEventPublisher, list[list[bytes]]]] = {}
        self.replays = 0
        for _ in range(3):
            self.start()

    def start(self) -> None:
        self.lives += 1
        worker = process(f"worker-{self.lives % 3}", life=self.lives)
        events_max = self.random.choice([2, 10, 1000])
        self.workers[worker] = (KvEventPublisher(worker, events_max), [])

    def die(self) -> None:
        worker = self.random.choice(list(self.workers))
        del self.workers[worker]
        self.caches.forget(worker)
        self.start()

    def lost(self) -> bool:
        return self.random.random() < self.loss

    def act(self) -> None:
        self.now += 0.1
        if self.random.random() < 0.01:
            self.die()
        for worker, (announcer, chains) in self.workers.items():
            self.compute(announcer, chains)
            for message in announcer.take():
                if not self.lost():
                    self.caches.apply_events(message)
            if round(self.now * 10) % 5 == 0 and not self.lost():
                self.caches.on_heartbeat(worker, announcer.seq)
        self.ask()

    def compute(self, announcer: KvEventPublisher, chains: list[list[bytes]]) -> None:
        draw = self.random.random()
        if draw < 0.01:
            chains.clear()
            announcer.add([BlocksCleared()])
        elif draw < 0.2 and chains:
            chain = self.random.choice(chains)
            gone = chain[self.random.randrange(len(chain)) :]
            del chain[len(chain) - len(gone) :]
            chains[:] = [chain for chain in chains if chain]
            announcer.add([blocks_removed(tuple(gone))])
        elif draw < 0.5:
            chain = [self.random.randbytes(DIGEST_BYTES) for _ in range(self.random.randint(1, 5))]
            chains.append(chain)
            announcer.add([blocks_stored(ROOT, tuple(chain))])

    def ask(self) -> None:
        for worker, ask in self.caches.due_replays(self.now):
            self.replays += 1
            if not self.lost():
                self.caches.apply_replay(worker, self.workers[worker][0].replay(ask))

    def check(self) -> None:
        there = 0
        for worker, (_, chains) in self.workers.items():
            for chain in chains:
                assert self.caches.overlaps(b"".join(chain)) == {worker: len(chain)}
                there += len(chain)
        assert self.caches.blocks == there


@pytest.mark.parametrize("seed", range(40))
def test_with_messages_lost_and_workers_replaced_the_index_comes_to_know_what_is_there(
    seed: int,
) -> None:
    world = World(seed)
    for _ in range(3):
        world.loss = 0.3
        for _ in range(300):
            world.act()
        assert world.replays
        world.loss = 0.0
        for worker, (announcer, _) in world.workers.items():
            world.caches.on_heartbeat(worker, announcer.seq)
            world.caches.on_heartbeat(worker, announcer.seq)
        for _ in range(3):  # a snapshot, and what came after it
            world.now += REPLAY_RETRY_S
            world.ask()
        world.check()


@pytest.mark.parametrize("seed", range(20))
def test_index_at_its_bound_comes_to_know_all_when_there_is_room_again(seed: int) -> None:
    world = World(seed, blocks_max=60)
    for _ in range(400):
        world.act()
        assert world.caches.blocks <= 60
    world.loss = 0.0
    for announcer, chains in world.workers.values():
        for chain in chains[4:]:
            announcer.add([blocks_removed(tuple(chain))])
        del chains[4:]
    for worker, (announcer, _) in world.workers.items():
        announcer.take()
        world.caches.on_heartbeat(worker, announcer.seq)
        world.caches.on_heartbeat(worker, announcer.seq)
    for _ in range(4):
        world.now += FULL_REPLAY_RETRY_S
        for _ in range(4):
            world.now += REPLAY_RETRY_S
            world.ask()
    # At most three workers with four chains of five blocks.
    if sum(len(chain) for _, chains in world.workers.values() for chain in chains) <= 50:
        world.check()


@pytest.mark.parametrize("seed", range(10))
def test_a_large_snapshot_is_read_while_the_cache_goes_on_changing(seed: int) -> None:
    chance = random.Random(seed)
    announcer, caches = KvEventPublisher(W, 4), WorkerCaches(1_000_000)
    chains = [[chance.randbytes(DIGEST_BYTES) for _ in range(1000)] for _ in range(12)]
    for chain in chains:
        announcer.add([blocks_stored(ROOT, tuple(chain))])
    announcer.take()
    caches.on_heartbeat(W, announcer.seq)
    for turn in range(40):
        for worker, ask in caches.due_replays(float(turn)):
            caches.apply_replay(worker, announcer.replay(ask))
        if turn < 20 and turn % 3 == 0:
            gone = chains.pop(0)
            announcer.add([blocks_removed(tuple(gone))])
        follow(caches, announcer)
    assert caches.blocks == sum(map(len, chains))
    for chain in chains:
        assert caches.overlaps(b"".join(chain)) == {W: len(chain)}
