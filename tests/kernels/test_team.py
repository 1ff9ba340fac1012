"""A thread in the seat of another's teams computes with it, and changes no bit."""

from __future__ import annotations

from threading import Thread

import pytest
import torch
from tests.kernels.test_linear import drawn, packed

from antiphon.kernels.cpu import extension

pytestmark = pytest.mark.skipif(
    bool(extension.unavailable_reason()), reason=str(extension.unavailable_reason())
)


@pytest.mark.timeout(60)
def test_a_thread_in_the_seat_computes_and_changes_no_bit() -> None:
    linear = packed(drawn(512, 256, dtype=torch.bfloat16), None).linear
    x = drawn(96, 256, dtype=torch.bfloat16, seed=1)
    expected = linear.multiply(x)
    seat = extension.team_seat()
    assert seat is not None
    ends: list[bool] = []
    results: list[bool] = []

    def forward() -> None:
        torch.set_num_threads(1)
        seat.offer()
        step = 0
        while not ends:  # the other thread may come too late for any number of them
            step += 1
            results.append(torch.equal(linear.multiply(x), expected))
            seat.finish(step)
        seat.finish(1 << 40)

    thread = Thread(target=forward)
    thread.start()
    regions, step = 0, 0
    while regions < 20:
        step += 1
        regions += seat.help(step)
    ends.append(True)
    thread.join()
    assert all(results)


@pytest.mark.timeout(60)
def test_what_is_over_is_not_waited_for() -> None:
    seat = extension.team_seat()
    assert seat is not None
    seat.finish(3)
    assert [seat.help(step) for step in (1, 2, 3)] == [0, 0, 0]
    waiting: list[int] = []
    thread = Thread(target=lambda: waiting.append(seat.help(4)))
    thread.start()
    seat.finish(4)
    thread.join()
    assert waiting == [0]
