"""When a loop that stands still is worth a word, and when the process has to end."""

from __future__ import annotations

import threading

from antiphon.model_worker.watchdog import Verdict, Watchdog, stack_of


def test_a_loop_that_goes_on_is_left_alone() -> None:
    dog = Watchdog(stall_s=2.0, limit_s=5.0)
    assert not any(dog.look(pulse, pulse * 1.0) for pulse in range(1, 100))


def test_a_loop_that_rests_may_do_so_for_ever() -> None:
    dog = Watchdog(stall_s=2.0, limit_s=5.0)
    assert not any(dog.look(0, now) for now in range(100))
    assert dog.look(8, 101.0) is None


def test_a_standstill_is_told_once_and_its_limit_always() -> None:
    dog = Watchdog(stall_s=2.0, limit_s=5.0)
    said = [dog.look(7, now) for now in range(8)]
    assert said == [None, None, Verdict.STALLED, None, None, *[Verdict.HUNG] * 3]


def test_a_loop_that_went_on_is_told_of_anew() -> None:
    dog = Watchdog(stall_s=2.0, limit_s=9.0)
    assert [dog.look(1, now) for now in (0, 2, 3)] == [None, Verdict.STALLED, None]
    assert [dog.look(2, now) for now in (4, 5, 6)] == [None, None, Verdict.STALLED]
    assert dog.stands_s(6.5) == 2.5


def test_a_limit_below_the_first_word_ends_it_at_once() -> None:
    dog = Watchdog(stall_s=30.0, limit_s=5.0)
    assert [dog.look(1, now) for now in (0, 6)] == [None, Verdict.HUNG]


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
