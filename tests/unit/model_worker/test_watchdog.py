"""When a loop that stands still is worth a word, and when the process has to end."""

from __future__ import annotations

import threading

from antiphon.model_worker.observability.stall_detector import StallDetector, StallVerdict, stack_of


def test_a_loop_that_goes_on_is_left_alone() -> None:
    dog = StallDetector(stall_s=2.0, limit_s=5.0)
    assert not any(dog.observe(pulse, pulse * 1.0) for pulse in range(1, 100))


def test_a_loop_that_rests_may_do_so_for_ever() -> None:
    dog = StallDetector(stall_s=2.0, limit_s=5.0)
    assert not any(dog.observe(0, now) for now in range(100))
    assert dog.observe(8, 101.0) is None


def test_a_standstill_is_told_once_and_its_limit_always() -> None:
    dog = StallDetector(stall_s=2.0, limit_s=5.0)
    said = [dog.observe(7, now) for now in range(8)]
    assert said == [None, None, StallVerdict.STALLED, None, None, *[StallVerdict.HUNG] * 3]


def test_a_loop_that_went_on_is_told_of_anew() -> None:
    dog = StallDetector(stall_s=2.0, limit_s=9.0)
    assert [dog.observe(1, now) for now in (0, 2, 3)] == [None, StallVerdict.STALLED, None]
    assert [dog.observe(2, now) for now in (4, 5, 6)] == [None, None, StallVerdict.STALLED]
    assert dog.stalled_s(6.5) == 2.5


def test_a_limit_below_the_first_word_ends_it_at_once() -> None:
    dog = StallDetector(stall_s=30.0, limit_s=5.0)
    assert [dog.observe(1, now) for now in (0, 6)] == [None, StallVerdict.HUNG]


def test_the_stack_of_a_thread_says_where_it_is() -> None:
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
