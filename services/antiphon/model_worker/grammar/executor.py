"""Grammars followed beside the loop: a step waits a moment for all of them, and for none longer.

How long a token takes to follow depends on how many ways there are to read the answer, and nothing
bounds that but patience. A walk that takes too long keeps its own choice waiting and nobody else;
what the choice says is the same, however long it took.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.model_worker.batching.request import Finish
    from antiphon.model_worker.grammar.matcher import GrammarMatcher

PATIENCE_S = 0.005
"""How long a step waits for all its guides together, hundreds of times what they do take."""
STUCK_MAX = 4
"""Walks nobody waits for that may still run, beside the two lanes: each takes a part of a core."""
_NICE = 10


class MatcherTask:
    """A guide on its way over the tokens that its row has drawn.

    Attributes:
        guide: It belongs to whoever walks until it has arrived.
        finishes: How each token ends the choice, if it does, up to the first that does.
        done: Whether it has arrived.
    """

    def __init__(self, matcher: GrammarMatcher, tokens: Sequence[int]) -> None:
        self.matcher = matcher
        self.finishes: list[Finish | None] = []
        self.done = False
        self._tokens = tokens
        self._bug: Exception | None = None

    def run(self) -> None:
        """Go all the way."""
        try:
            self._run()
        except Exception as error:  # noqa: BLE001  # raised again in the loop's thread
            self._bug = error
        self.done = True

    def result(self) -> Sequence[Finish | None]:
        """How each token ends the choice by its grammar, once the walk is done.

        Raises:
            Exception: What nobody expected on the way.
        """
        if self._bug is not None:
            raise self._bug
        return self.finishes

    def _run(self) -> None:
        self.matcher.checkpoint()
        for token in self._tokens:
            self.finishes.append(self.matcher.accept_token(token))
            if self.finishes[-1] is not None:
                break


class MatcherExecutor(Protocol):
    """Who follows the guides of a batching loop."""

    def submit(self, tasks: Sequence[MatcherTask]) -> None:
        """Begin walks. Most are done when it returns; the others will be."""
        ...

    def wait(self) -> None:
        """Wait a moment for those that are not done."""
        ...

    def cancel(self, task: MatcherTask) -> None:
        """Nobody waits for a walk any more. It may never arrive."""
        ...


class InlineMatcherExecutor:
    """Follows in the loop's own thread, however long it takes."""

    def submit(self, tasks: Sequence[MatcherTask]) -> None:
        """See `MatcherExecutor`."""
        for task in tasks:
            task.run()

    def wait(self) -> None:
        """See `MatcherExecutor`."""

    def cancel(self, task: MatcherTask) -> None:
        """See `MatcherExecutor`."""


class ThreadedMatcherExecutor:
    """Follows in threads of its own, in two lanes: guides that were slow once wait for each other.

    A walk cannot be interrupted. If it holds up the quick lane, its thread becomes the walk's own,
    and another takes over; so too if nobody waits any more for one that holds up the slow lane. A
    few such threads are borne; then what comes behind such a walk waits for it.
    """

    def __init__(self, patience_s: float = PATIENCE_S, stuck_max: int = STUCK_MAX) -> None:
        """No thread is started before there is something to follow."""
        self._patience_s = patience_s
        self._stuck_max = stuck_max
        self._news = threading.Condition()
        self._quick = _MatcherThread("guides", nice=0)
        self._slow = _MatcherThread("slow guides", nice=_NICE)
        self._stuck = 0

    def submit(self, tasks: Sequence[MatcherTask]) -> None:
        """See `MatcherExecutor`."""
        if not tasks:
            return
        with self._news:
            quick = [task for task in tasks if not task.matcher.slow]
            self._quick.waiting += quick
            self._slow.waiting += [task for task in tasks if task.matcher.slow]
            self._staff()
            self._news.notify_all()
            arrived = self._news.wait_for(
                lambda: all(task.done for task in quick), self._patience_s
            )
            current = self._quick.current
            if not arrived and current is not None and not current.done:
                current.matcher.slow = True
                self._leave_alone(self._quick)

    def wait(self) -> None:
        """See `MatcherExecutor`."""
        with self._news:
            self._news.wait(self._patience_s)

    def cancel(self, task: MatcherTask) -> None:
        """See `MatcherExecutor`."""
        with self._news:
            for lane in (self._quick, self._slow):
                if task in lane.waiting:
                    lane.waiting.remove(task)
                elif lane.current is task:
                    self._leave_alone(lane)

    def _leave_alone(self, lane: _MatcherThread) -> None:
        """Let the thread of a lane end with its walk, and another go on with the rest."""
        if self._stuck < self._stuck_max:
            self._stuck += 1
            lane.current = lane.thread = None
            self._staff()

    def _staff(self) -> None:
        for lane in (self._quick, self._slow):
            if lane.thread is None and lane.waiting:
                lane.thread = threading.Thread(
                    target=self._work, args=(lane,), name=lane.name, daemon=True
                )
                lane.thread.start()

    def _work(self, lane: _MatcherThread) -> None:
        here = threading.current_thread()
        if lane.nice and sys.platform == "linux":  # where each thread has a priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), lane.nice)
        while True:
            with self._news:
                if lane.thread is not here:
                    self._stuck -= 1
                    self._news.notify_all()
                    return
                lane.current = None
                if not lane.waiting:
                    self._news.notify_all()
                    self._news.wait_for(lambda: lane.waiting)
                lane.current = task = lane.waiting.popleft()
            task.run()


class _MatcherThread:
    """Walks that one thread goes, one after the other."""

    def __init__(self, name: str, *, nice: int) -> None:
        self.name = name
        self.nice = nice
        self.waiting: deque[MatcherTask] = deque()
        self.current: MatcherTask | None = None
        self.thread: threading.Thread | None = None
