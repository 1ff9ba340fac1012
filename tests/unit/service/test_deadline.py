"""Deadlines on a clock."""

from __future__ import annotations

import pytest

from antiphon.service.deadline import check, deadline_in, remaining_s
from antiphon.testing.clock import ManualClock
from antiphon.wire.errors import DeadlineExceeded


def test_a_deadline_runs_down_and_is_then_exceeded() -> None:
    clock = ManualClock()
    deadline = deadline_in(2.0, clock)
    clock.advance(0.5)
    assert check(deadline, clock) == remaining_s(deadline, clock) == 1.5
    clock.advance(1.5)
    assert remaining_s(deadline, clock) == 0
    with pytest.raises(DeadlineExceeded):
        check(deadline, clock)
