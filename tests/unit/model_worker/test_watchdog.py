"""When a loop that stands still is worth a word, and when the process has to end."""

from __future__ import annotations

import threading

from antiphon.model_worker.observability.watchdog import StallDetector, StallVerdict, stack_of


def test_loop_with_progress_is_not_reported() -> None:
    dog = StallDetector(stall_s=2.0, limit_s=5.0)
    assert not any(dog.observe(pulse, pulse * 1.0) for pulse in range(1, 100))


def test_idle_loop_is_never_reported() -> None:
    dog = StallDetector(stall_s=2.0, limit_s=5.0)
    assert not any(dog.observe(0, now) for now in range(100))
    assert dog.observe(8, 101.0) is None


def test_stall_is_reported_once_and_a_hang_always() -> None:
    dog = StallDetector(stall_s=2.0, limit_s=5.0)
    said = [dog.observe(7, now) for now in range(8)]
    assert said == [None, None, StallVerdict.STALLED, None, None, *[StallVerdict.HUNG] * 3]


def test_recovered_loop_is_reported_again() -> None:
    dog = StallDetector(stall_s=2.0, limit_s=9.0)
    assert [dog.observe(1, now) for now in (0, 2, 3)] == [None, StallVerdict.STALLED, None]
    assert [dog.observe(2, now) for now in (4, 5, 6)] == [None, None, StallVerdict.STALLED]
    assert dog.stalled_s(6.5) == 2.5


def test_limit_below_the_stall_time_is_a_hang_at_once() -> None:
    dog = StallDetector(stall_s=30.0, limit_s=5.0)
    assert [dog.observe(1, now) for now in (0, 6)] == [None, StallVerdict.HUNG]


def test_stack_of_a_thread_names_its_function() -> None:
    held, there = threading.Event(), threading.Event()

    def hang_about() -> None:
        there.set()
        held.wait(10)

    thread = threading.Thread(target=hang_about)
    thread.start()
    assert there.wait(10)
    assert "hang_about" in stack_of(thread.ident)
    held.set()
    thread.join()
    assert stack_of(thread.ident) == ""
    assert stack_of(None) == ""
