"""Named times: the earliest first, each once, and nothing kept of what was dropped."""

from __future__ import annotations

from antiphon.gateway.owner.machine import Timers


def test_a_key_wakes_at_the_time_it_was_set_to_last() -> None:
    timers: Timers[str] = Timers()
    timers.set("a", 1.0)
    timers.set("b", 2.0)
    timers.set("a", 3.0)
    timers.set("c", 2.5)
    timers.drop("c")
    assert timers.pop_due(1.5) is None
    assert [timers.pop_due(9.0) for _ in range(3)] == ["b", "a", None]


def test_distant_times_that_were_dropped_take_no_room() -> None:
    timers: Timers[int] = Timers()
    for key in range(10_000):
        timers.set(key, 600.0)
        if key % 100:
            timers.drop(key)
    assert len(timers._heap) < 300
    woken = [timers.pop_due(600.0) for _ in range(101)]
    assert woken == [*range(0, 10_000, 100), None]
