"""What a worker tells schedulers of its cache, in messages."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from tests.support.worker import blocks_removed, blocks_stored

from antiphon.model_worker.protocol.kv_events import MESSAGE_BYTES_MAX, KvEventPublisher
from antiphon.wire.base import Process
from antiphon.wire.codec import encode
from antiphon.wire.digests import DIGEST_BYTES
from antiphon.wire.ids import Incarnation, InstanceId
from antiphon.wire.kv_events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KvEvent,
    KvReplayed,
    ReplayKv,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

WORKER = Process(instance=InstanceId("worker-0"), incarnation=Incarnation("1"))
ROOT = b"r" * DIGEST_BYTES


def block(number: int) -> bytes:
    return number.to_bytes(DIGEST_BYTES)


def stored(*numbers: int) -> BlocksStored:
    """Blocks that follow the root, one after the other."""
    return blocks_stored(ROOT, tuple(map(block, numbers)))


def long_chains(count: int) -> list[KvEvent]:
    """So much that it takes several messages."""
    return [stored(*range(1000 * chain, 1000 * chain + 1000)) for chain in range(count)]


class Listener:
    """Applies whatever comes, however it comes."""

    def __init__(self, announcer: KvEventPublisher) -> None:
        self.announcer = announcer
        self.seq = 0
        self.blocks: set[bytes] = set()

    def apply(self, events: Sequence[KvEvent]) -> None:
        for event in events:
            match event:
                case BlocksStored():
                    self.blocks |= cut(event.digests)
                case BlocksRemoved():
                    self.blocks -= cut(event.digests)
                case BlocksCleared():
                    self.blocks.clear()

    def catch_up(self) -> list[KvReplayed]:
        """Ask until there is nothing more to hear."""
        replies: list[KvReplayed] = []
        ask = ReplayKv(after=self.seq)
        while self.seq < self.announcer.seq or ask.part:
            reply = self.announcer.replay(ask)
            replies.append(reply)
            self.apply(reply.events)
            if not reply.part:
                self.seq = reply.seq
            ask = ReplayKv(after=self.seq, snapshot=reply.seq, part=reply.part)
        return replies


def cut(digests: bytes) -> set[bytes]:
    return {digests[i : i + DIGEST_BYTES] for i in range(0, len(digests), DIGEST_BYTES)}


def test_what_a_step_did_is_one_message_with_the_number_of_its_last_event() -> None:
    announcer = KvEventPublisher(WORKER, 100)
    announcer.add((stored(1, 2), blocks_removed((block(2),))))
    announcer.add((BlocksCleared(),))
    (message,) = announcer.take()
    assert (message.worker, message.seq) == (WORKER, 3)
    assert message.events == (
        BlocksStored(parent=ROOT, digests=block(1) + block(2)),
        BlocksRemoved(digests=block(2)),
        BlocksCleared(),
    )
    assert announcer.take() == []


def test_a_large_step_is_cut_into_messages_that_follow_each_other() -> None:
    announcer = KvEventPublisher(WORKER, 100)
    announcer.add(long_chains(10))
    messages = announcer.take()
    assert len(messages) > 1
    assert max(len(encode(message)) for message in messages) < 1.1 * MESSAGE_BYTES_MAX
    firsts = [message.seq - len(message.events) for message in messages]
    assert firsts == [0, *(message.seq for message in messages[:-1])]
    assert messages[-1].seq == announcer.seq == 10


def test_a_little_that_was_missed_is_said_again_one_by_one() -> None:
    announcer = KvEventPublisher(WORKER, 100)
    announcer.add((stored(1), stored(2), stored(3)))
    reply = announcer.replay(ReplayKv(after=1))
    assert (reply.seq, len(reply.events), reply.part) == (3, 2, 0)
    assert announcer.replay(ReplayKv(after=3)) == KvReplayed(worker=WORKER, seq=3)


def test_a_long_replay_comes_in_as_many_answers_as_it_takes() -> None:
    announcer = KvEventPublisher(WORKER, 100)
    announcer.add(long_chains(10))
    listener = Listener(announcer)
    replies = listener.catch_up()
    assert len(replies) > 1
    assert len(listener.blocks) == 10_000
    assert not any(isinstance(event, BlocksCleared) for r in replies for event in r.events)


def test_who_missed_too_much_is_told_everything_in_parts() -> None:
    announcer = KvEventPublisher(WORKER, 2)
    announcer.add(long_chains(10))
    listener = Listener(announcer)
    listener.blocks = {block(123_456)}
    replies = listener.catch_up()
    assert len(replies) > 1
    assert max(len(encode(reply)) for reply in replies) < 1.1 * MESSAGE_BYTES_MAX
    assert listener.blocks == {block(number) for number in range(10_000)}


def test_what_happens_while_a_snapshot_is_read_is_heard_after_it() -> None:
    announcer = KvEventPublisher(WORKER, 3)
    announcer.add(long_chains(10))
    listener = Listener(announcer)
    first = announcer.replay(ReplayKv(after=0))
    announcer.add((stored(99_999), blocks_removed((block(0),))))
    listener.apply(first.events)
    second = announcer.replay(ReplayKv(after=0, snapshot=first.seq, part=first.part))
    assert second.seq == first.seq == 10
    assert not any(isinstance(event, BlocksCleared) for event in second.events)
    listener.catch_up()
    assert listener.blocks == {block(number) for number in (*range(1, 10_000), 99_999)}


@pytest.mark.parametrize("seed", range(30))
def test_whoever_misses_messages_and_asks_knows_what_is_there(seed: int) -> None:
    chance = random.Random(seed)
    announcer = KvEventPublisher(WORKER, chance.choice([1, 3, 50]))
    listener, there = Listener(announcer), set[int]()
    for number in range(300):
        draw = chance.random()
        if draw < 0.02:
            announcer.add((BlocksCleared(),))
            there.clear()
        elif draw < 0.4 and there:
            gone = chance.choice(sorted(there))
            announcer.add((blocks_removed((block(gone),)),))
            there.remove(gone)
        else:
            announcer.add((stored(number),))
            there.add(number)
        for message in announcer.take():
            if chance.random() < 0.7 and message.seq - len(message.events) == listener.seq:
                listener.apply(message.events)
                listener.seq = message.seq
        if chance.random() < 0.1:
            listener.catch_up()
            assert listener.blocks == set(map(block, there))
