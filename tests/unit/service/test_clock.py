"""Clocks and deadlines, numbers that show loss, and the order by priority."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest
from tests.support.clock import ManualClock
from tests.support.services import process

from antiphon.config.worker import Policy, QueueConfig
from antiphon.service.clock import Clock, check, deadline_in, remaining_s
from antiphon.service.priority import OvertakeTracker, PriorityPolicy
from antiphon.service.sequence import Arrival, SeqReceiver, SeqSender
from antiphon.wire.errors import DeadlineExceeded
from antiphon.wire.heartbeat import StreamSeq
from antiphon.wire.ids import InstanceId, ModelName, new_request_id
from antiphon.wire.tokenize import DecodeRequest

MODEL = ModelName("model")


async def test_sleepers_wake_in_the_order_of_their_times() -> None:
    clock = ManualClock()
    woken: list[str] = []

    async def sleep(name: str, seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append(name)

    async with asyncio.TaskGroup() as group:
        for name, seconds in (("late", 3.0), ("first", 1.0), ("second", 1.0), ("middle", 2.0)):
            group.create_task(sleep(name, seconds))
        await asyncio.sleep(0)
        assert clock.sleepers == 4
        clock.advance(0.5)
        await asyncio.sleep(0)
        assert not woken
        clock.advance(1.5)
        await asyncio.sleep(0)
        assert woken == ["first", "second", "middle"]
        clock.advance(1)
    assert woken[-1] == "late"
    assert clock.sleepers == 0


async def test_cancelled_sleeper_is_forgotten() -> None:
    clock = ManualClock()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(clock.sleep(1))
        await asyncio.sleep(0)
        task.cancel()
    assert clock.sleepers == 0
    clock.advance(2)


def test_both_times_move_together_and_never_back() -> None:
    manual = ManualClock(now=5.0, unix_ms=10_000)
    clock: Clock = manual
    assert (clock.now(), clock.unix_ms()) == (5.0, 10_000)
    manual.advance(1.25)
    assert (clock.now(), clock.unix_ms()) == (6.25, 11_250)
    with pytest.raises(ValueError, match="does not go back"):
        manual.advance(-1)


def test_deadline_runs_down_and_is_then_exceeded() -> None:
    clock = ManualClock()
    deadline = deadline_in(2.0, clock)
    clock.advance(0.5)
    call = DecodeRequest(
        request_id=new_request_id(), model=MODEL, token_ids=(), deadline_unix_ms=deadline
    )
    assert check(call, clock) == remaining_s(deadline, clock) == 1.5
    clock.advance(1.5)
    assert remaining_s(deadline, clock) == 0
    with pytest.raises(DeadlineExceeded):
        check(call, clock)


@pytest.mark.parametrize("ahead_s", [-5.0, 5.0])
def test_time_that_is_left_of_a_call_counts_from_its_receipt(ahead_s: float) -> None:
    """Whatever the clock of the caller shows."""
    clock = ManualClock()
    call = DecodeRequest(
        request_id=new_request_id(),
        model=MODEL,
        token_ids=(),
        deadline_unix_ms=deadline_in(2.0 + ahead_s, clock),
        left_ms=2000,
    )
    assert check(call, clock) == 2.0
    with pytest.raises(DeadlineExceeded):
        check(msgspec.structs.replace(call, left_ms=0), clock)


WORKER = process("worker-0")
REBORN = process("worker-0", "2")
ME = InstanceId("detokenizer-0")


def named(seq: int) -> tuple[StreamSeq, ...]:
    return (StreamSeq(receiver=ME, seq=seq),)


def test_sender_counts_each_receiver_from_one() -> None:
    sender = SeqSender()
    assert [sender.next(ME), sender.next(InstanceId("other")), sender.next(ME)] == [1, 1, 2]
    assert set(sender.streams()) == {
        StreamSeq(receiver=ME, seq=2),
        StreamSeq(receiver=InstanceId("other"), seq=1),
    }


def test_heartbeat_lists_only_recent_receivers_and_none_is_forgotten() -> None:
    sender = SeqSender()
    for n in range(200):
        sender.next(InstanceId(f"other-{n}"))
    sender.next(ME)
    assert len(sender.streams()) == 64
    assert StreamSeq(receiver=ME, seq=1) in sender.streams()
    assert sender.next(InstanceId("other-0")) == 2


def test_arrivals_of_each_life_are_next_duplicate_or_gap() -> None:
    receiver = SeqReceiver()
    seen = [receiver.accept(WORKER, seq) for seq in (1, 2, 2, 1, 5, 4, 6)]
    assert seen == ["next", "next", "duplicate", "duplicate", "gap", "duplicate", "next"]
    assert SeqReceiver().accept(WORKER, 4711) is Arrival.GAP
    receiver = SeqReceiver()
    receiver.accept(WORKER, 7)
    assert receiver.accept(REBORN, 1) is Arrival.NEXT
    assert receiver.accept(WORKER, 8) is Arrival.NEXT


def test_lost_tail_is_reported_once_and_only_after_a_heartbeat_of_grace() -> None:
    receiver = SeqReceiver()
    receiver.accept(WORKER, 1)
    assert not receiver.tail_lost(WORKER, ME, named(2))  # it may still be under way
    assert receiver.tail_lost(WORKER, ME, named(2))
    assert not receiver.tail_lost(WORKER, ME, named(2))
    assert receiver.accept(WORKER, 3) is Arrival.NEXT
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


def test_rank_is_one_without_priorities_and_preempts_above_the_threshold() -> None:
    assert {PriorityPolicy().rank(priority) for priority in (-5, 0, 7)} == {0}
    precedence = PriorityPolicy(priority=True, preempt_threshold=3)
    assert [precedence.preempts(precedence.rank(n), 0) for n in (3, 4)] == [False, True]


@pytest.mark.parametrize(("low_first", "order"), [(False, [7, 0, -5]), (True, [-5, 0, 7])])
def test_lower_rank_goes_first(low_first: bool, order: list[int]) -> None:
    precedence = PriorityPolicy(priority=True, low_first=low_first)
    assert sorted((0, -5, 7), key=precedence.rank) == order


@pytest.mark.parametrize("queue", [QueueConfig(priority=True), QueueConfig(policy=Policy.PRIORITY)])
def test_settings_have_two_names_for_priorities(queue: QueueConfig) -> None:
    assert PriorityPolicy.from_config(queue).priority


def test_overtaken_requests_are_overdue_after_a_while() -> None:
    waiting = {"a", "b", "c", "d"}
    overtaken = OvertakeTracker[str](5.0, waiting.__contains__)
    for arrival, name in enumerate(sorted(waiting)):
        overtaken.enter(arrival, name)
    overtaken.overtake(2, now=10.0)
    waiting -= {"a", "c"}
    assert list(overtaken.pop_overdue(14.9)) == []
    assert list(overtaken.pop_overdue(15.0)) == ["b"]
    assert list(overtaken.pop_overdue(15.0)) == []


def test_requests_that_leave_are_swept_although_none_are_admitted() -> None:
    waiting = {"first"}
    overtaken = OvertakeTracker[str](5.0, waiting.__contains__)
    overtaken.enter(0, "first")
    for arrival in range(1, 10_000):
        name = str(arrival)
        waiting.add(name)
        overtaken.enter(arrival, name)
        waiting.remove(name)
    assert len(overtaken) <= 64
    overtaken.overtake(10_000, now=1.0)
    assert list(overtaken.pop_overdue(6.0)) == ["first"]


def test_a_sender_forgets_the_receivers_of_long_ago() -> None:
    sender = SeqSender()
    for number in range(70_000):
        sender.next(InstanceId(f"detokenizer-{number}"))
    assert sender.next(InstanceId("detokenizer-69999")) == 2
    assert sender.next(InstanceId("detokenizer-0")) == 1
