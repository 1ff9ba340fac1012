"""Guides are followed beside the loop, which waits for none of them longer than for a moment."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest
from tests.unit.model_worker.grammar.words import END, VOCAB_SIZE, Word

from antiphon.model_worker.grammar.executor import MatcherTask, ThreadedMatcherExecutor
from antiphon.model_worker.grammar.matcher import GrammarMatcher
from antiphon.wire.base import FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterator

C, A = 5, 3
PATIENCE_S = 0.02
STILL_S = 1.0
"""Far longer than patience, on a busy machine too, and far shorter than a stuck walk takes."""


class Stuck(Word):
    """Follows its second token when it is released."""

    def __init__(self, text: str, released: threading.Event) -> None:
        super().__init__(text)
        self.released = released

    def accept(self, token: int) -> bool:
        if self.place == 1:
            assert self.released.wait(20)
        return super().accept(token)


class Broken(Word):
    def accept(self, token: int) -> bool:
        raise ZeroDivisionError


@pytest.fixture
def released() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def guide(word: Word) -> GrammarMatcher:
    return GrammarMatcher(word, VOCAB_SIZE, frozenset({END}))


def walked(
    threads: ThreadedMatcherExecutor, guides: list[GrammarMatcher], token: int
) -> tuple[list[MatcherTask], float]:
    """Begin to follow a token in each; how long the loop was kept."""
    walks = [MatcherTask(each, [token]) for each in guides]
    began = time.perf_counter()
    threads.submit(walks)
    return walks, time.perf_counter() - began


def arrived(threads: ThreadedMatcherExecutor, walks: list[MatcherTask]) -> bool:
    until = time.perf_counter() + 10
    while not all(walk.done for walk in walks) and time.perf_counter() < until:
        threads.wait()
    return all(walk.done for walk in walks)


def test_what_takes_no_time_is_done_at_once() -> None:
    threads = ThreadedMatcherExecutor(patience_s=10.0)
    guides = [guide(Word("ca")) for _ in range(64)]
    for token, ends in ((C, None), (A, None), (END, FinishReason.STOP)):
        walks, _ = walked(threads, guides, token)
        assert all(walk.done for walk in walks)
        for walk in walks:
            (finish,) = walk.finishes
            assert (finish and finish.reason) == ends


def test_a_guide_that_is_stuck_keeps_neither_the_step_nor_the_others(
    released: threading.Event,
) -> None:
    threads = ThreadedMatcherExecutor(PATIENCE_S)
    stuck, others = guide(Stuck("cab", released)), [guide(Word("cab")) for _ in range(8)]
    walked(threads, [stuck, *others], C)
    walks, kept_s = walked(threads, [stuck, *others], A)
    assert kept_s < STILL_S
    assert stuck.slow
    assert not walks[0].done
    assert arrived(threads, walks[1:])
    released.set()
    assert arrived(threads, walks)
    assert walks[0].finishes == [None]


def test_a_step_is_bounded_however_many_are_stuck(released: threading.Event) -> None:
    threads = ThreadedMatcherExecutor(PATIENCE_S, stuck_max=2)
    guides = [guide(Stuck("cab", released)) for _ in range(64)]
    walked(threads, guides, C)
    walks, kept_s = walked(threads, guides, A)
    assert kept_s < STILL_S
    free = guide(Word("cab"))
    for _ in range(4):  # each finds one more of them stuck, up to the bound
        mine, kept_s = walked(threads, [free], C)
        assert kept_s < STILL_S
        if not mine[0].done:
            break
    released.set()
    assert arrived(threads, walks)


def test_a_walk_that_nobody_waits_for_does_not_hold_up_the_slow_ones(
    released: threading.Event,
) -> None:
    threads = ThreadedMatcherExecutor(PATIENCE_S)
    gone, slow = guide(Stuck("cab", released)), guide(Word("cab"))
    gone.slow = slow.slow = True
    threads.submit([MatcherTask(gone, [C])])
    (stuck,), _ = walked(threads, [gone], A)
    behind = MatcherTask(slow, [C, A])
    threads.submit([behind])
    threads.wait()
    assert not behind.done
    threads.cancel(stuck)
    assert arrived(threads, [behind])
    waiting = MatcherTask(slow, [C])
    threads.cancel(waiting)  # it never began


def test_what_nobody_expected_is_raised_in_the_loop() -> None:
    threads = ThreadedMatcherExecutor(patience_s=10.0)
    walks, _ = walked(threads, [guide(Broken("cab"))], C)
    with pytest.raises(ZeroDivisionError):
        walks[0].result()
    walks, _ = walked(threads, [guide(Word("cab"))], C)
    assert walks[0].done


def test_a_guide_stands_again_where_it_stood_at_the_mark() -> None:
    word = guide(Word("cab"))
    word.accept_token(C)
    assert word.mask is not None
    before = word.mask.tolist()
    for _ in range(3):
        MatcherTask(word, [A, 4]).run()
        assert word.mask.tolist() != before
        word.rollback()
        assert word.mask.tolist() == before
