"""Numbers that show loss."""

from __future__ import annotations

import random

import pytest

from antiphon.service.sequence import Arrival, SeqReceiver, SeqSender
from antiphon.wire.base import Process
from antiphon.wire.heartbeat import StreamSeq
from antiphon.wire.ids import Incarnation, InstanceId

WORKER = Process(instance=InstanceId("worker-0"), incarnation=Incarnation("1"))
REBORN = Process(instance=InstanceId("worker-0"), incarnation=Incarnation("2"))
ME = InstanceId("detokenizer-0")


def named(seq: int) -> tuple[StreamSeq, ...]:
    return (StreamSeq(receiver=ME, seq=seq),)


def test_a_sender_counts_each_receiver_from_one() -> None:
    sender = SeqSender()
    assert [sender.next(ME), sender.next(InstanceId("other")), sender.next(ME)] == [1, 1, 2]
    assert set(sender.streams()) == {
        StreamSeq(receiver=ME, seq=2),
        StreamSeq(receiver=InstanceId("other"), seq=1),
    }


def test_the_heartbeat_lists_only_recent_receivers_and_none_is_forgotten() -> None:
    sender = SeqSender()
    for n in range(200):
        sender.next(InstanceId(f"other-{n}"))
    sender.next(ME)
    assert len(sender.streams()) == 64
    assert StreamSeq(receiver=ME, seq=1) in sender.streams()
    assert sender.next(InstanceId("other-0")) == 2


def test_arrivals_are_next_duplicate_or_gap() -> None:
    receiver = SeqReceiver()
    seen = [receiver.accept(WORKER, seq) for seq in (1, 2, 2, 1, 5, 4, 6)]
    assert seen == ["next", "next", "duplicate", "duplicate", "gap", "duplicate", "next"]


def test_a_receiver_that_comes_late_sees_a_gap() -> None:
    assert SeqReceiver().accept(WORKER, 4711) is Arrival.GAP


def test_each_life_of_a_sender_counts_from_one() -> None:
    receiver = SeqReceiver()
    receiver.accept(WORKER, 7)
    assert receiver.accept(REBORN, 1) is Arrival.NEXT
    assert receiver.accept(WORKER, 8) is Arrival.NEXT


def test_a_lost_tail_is_reported_once_and_after_a_heartbeat_of_grace() -> None:
    receiver = SeqReceiver()
    receiver.accept(WORKER, 1)
    assert not receiver.tail_lost(WORKER, ME, named(2))  # it may still be under way
    assert receiver.tail_lost(WORKER, ME, named(2))
    assert not receiver.tail_lost(WORKER, ME, named(2))
    assert receiver.accept(WORKER, 3) is Arrival.NEXT


def test_a_heartbeat_that_overtakes_its_messages_reports_nothing() -> None:
    receiver = SeqReceiver()
    for seq in range(1, 50):
        assert not receiver.tail_lost(WORKER, ME, named(seq))
        assert receiver.accept(WORKER, seq) is Arrival.NEXT


@pytest.mark.parametrize("seed", range(100))
def test_every_loss_is_seen_and_nothing_else(seed: int) -> None:
    print(f"seed {seed}")
    dice, sender, receiver = random.Random(seed), SeqSender(), SeqReceiver()
    lost = reported = False
    for _ in range(200):
        seq = sender.next(ME)
        if dice.random() < 0.1:
            lost = True
            continue
        arrival = receiver.accept(WORKER, seq)
        assert arrival is (Arrival.GAP if lost else Arrival.NEXT)
        lost = False
    for _ in range(2):
        reported = receiver.tail_lost(WORKER, ME, sender.streams()) or reported
    assert reported is lost
