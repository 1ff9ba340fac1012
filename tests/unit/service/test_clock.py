"""The manual clock stands still, and wakes sleepers in order; deadlines on it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
import pytest
from tests.support.clock import ManualClock

from antiphon.service.clock import check, deadline_in, remaining_s
from antiphon.wire.errors import DeadlineExceeded
from antiphon.wire.ids import ModelName, new_request_id
from antiphon.wire.tokenize import DecodeRequest

if TYPE_CHECKING:
    from antiphon.service.clock import Clock

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


def test_a_deadline_runs_down_and_is_then_exceeded() -> None:
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
