"""Deadlines on a clock."""

from __future__ import annotations

import msgspec
import pytest
from tests.support.clock import ManualClock

from antiphon.service.deadline import check, deadline_in, remaining_s
from antiphon.wire.errors import DeadlineExceeded
from antiphon.wire.ids import ModelName, new_request_id
from antiphon.wire.tokenize import DecodeRequest

MODEL = ModelName("model")


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
