"""Advances grammar matchers off the loop: a step waits a short time for all of them, never longer.

How long a token takes depends on how many ways the grammar has to parse the output so far, and only
a timeout bounds that. A matcher that takes too long delays its own sequence and no other; the
output of the sequence is the same, however long it took.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from antiphon.wire.errors import Overloaded

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from antiphon.model_worker.batching.plan import StepOutcome
    from antiphon.model_worker.batching.request import Request
    from antiphon.model_worker.batching.state import Finish
    from antiphon.model_worker.grammar.matcher import GrammarMatcher

PATIENCE_S = 0.005
"""How long a step waits for all its matchers together: hundreds of times what they usually take."""
STUCK_MAX = 4
"""Cancelled tasks that may still run, beside the two lanes: each takes a part of a core."""
_NICE = 10
_RETRY_AFTER_S = 5.0


class MatcherTask:
    """Advances a matcher, which it owns until it is done, over the tokens of a row to a finish."""

    def __init__(self, matcher: GrammarMatcher, tokens: Sequence[int]) -> None:
        self.matcher = matcher
        self.finishes: list[Finish | None] = []
        self.done = False
        self.tokens = tokens
        self._bug: Exception | None = None

    def run(self) -> None:
        try:
            self.matcher.checkpoint()
            for token in self.tokens:
                self.finishes.append(self.matcher.accept_token(token))
                if self.finishes[-1] is not None:
                    break
        except Exception as error:  # noqa: BLE001  # raised again in the loop's thread
            self._bug = error
        self.done = True

    def result(self) -> Sequence[Finish | None]:
        """The finishes of a task that is done; raises what the matcher raised unexpectedly."""
        if self._bug is not None:
            raise self._bug
        return self.finishes


class MatcherExecutor:
    """Runs tasks in two threads: one for matchers that were slow once, one for all others.

    A task cannot be interrupted. When one blocks the quick lane, its thread is detached and a new
    one takes over; likewise when a cancelled task blocks the slow lane. A few detached threads are
    allowed; beyond that, later tasks wait behind the blocked one.
    """

    def __init__(self, patience_s: float = PATIENCE_S, stuck_max: int = STUCK_MAX) -> None:
        self._patience_s = patience_s
        self._stuck_max = stuck_max
        self._changed = threading.Condition()
        self._fast = _MatcherThread("grammar matchers", nice=0)
        self._slow = _MatcherThread("slow grammar matchers", nice=_NICE)
        self._stuck = 0

    def submit(self, tasks: Sequence[MatcherTask]) -> None:
        """Start tasks. Most are done on return; the others finish later."""
        if not tasks:
            return
        with self._changed:
            fast = [task for task in tasks if not task.matcher.slow]
            self._fast.waiting += fast
            self._slow.waiting += [task for task in tasks if task.matcher.slow]
            self._start_threads()
            self._changed.notify_all()
            finished = self._changed.wait_for(
                lambda: all(task.done for task in fast), self._patience_s
            )
            current = self._fast.current
            if not finished and current is not None and not current.done:
                current.matcher.slow = True
                self._detach(self._fast)

    def wait(self) -> None:
        """Wait a short time for unfinished tasks."""
        with self._changed:
            self._changed.wait(self._patience_s)

    def cancel(self, task: MatcherTask) -> None:
        """Abandon a task whose result is no longer needed. It may never finish."""
        with self._changed:
            for lane in (self._fast, self._slow):
                if task in lane.waiting:
                    lane.waiting.remove(task)
                elif lane.current is task:
                    self._detach(lane)

    def _detach(self, lane: _MatcherThread) -> None:
        """Detach the thread of a lane, which ends with its task, and start another for the rest."""
        if self._stuck < self._stuck_max:
            self._stuck += 1
            lane.current = lane.thread = None
            self._start_threads()

    def _start_threads(self) -> None:
        for lane in (self._fast, self._slow):
            if lane.thread is None and lane.waiting:
                lane.thread = threading.Thread(
                    target=self._run_lane, args=(lane,), name=lane.name, daemon=True
                )
                lane.thread.start()

    def _run_lane(self, lane: _MatcherThread) -> None:
        thread = threading.current_thread()
        if lane.nice and sys.platform == "linux":  # where each thread has a priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), lane.nice)
        while True:
            with self._changed:
                if lane.thread is not thread:
                    self._stuck -= 1
                    self._changed.notify_all()
                    return
                lane.current = None
                if not lane.waiting:
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: lane.waiting)
                lane.current = task = lane.waiting.popleft()
            task.run()


@dataclass
class _MatcherThread:
    name: str
    nice: int
    waiting: deque[MatcherTask] = field(default_factory=deque["MatcherTask"])
    current: MatcherTask | None = None
    thread: threading.Thread | None = None


@dataclass(slots=True)
class PendingGrammarRow:
    """A row whose matcher task has not accepted its token yet.

    Attributes:
        generation: Of its slot: should that change, the row is dropped.
        index: Its row in the outcome.
        since: When the wait was first noticed.
    """

    request: Request
    generation: int
    outcome: StepOutcome
    index: int
    task: MatcherTask
    since: float | None = None


class PendingGrammarRows:
    """The rows that wait for their grammar matchers; other requests do not wait for them.

    A row that waits too long ends as overloaded, not as invalid: the time depends on the load of
    the machine.
    """

    def __init__(self, timeout_s: float) -> None:
        self.executor = MatcherExecutor()
        self._timeout_s = timeout_s
        self._rows: list[PendingGrammarRow] = []

    def __len__(self) -> int:
        return len(self._rows)

    def put(self, late: PendingGrammarRow) -> None:
        late.request.stalled = True
        self._rows.append(late)

    def take_done(self) -> Iterator[PendingGrammarRow]:
        """The rows whose matcher tasks are done, each once. Ended requests are forgotten."""
        rows, self._rows = self._rows, []
        for late in rows:
            request = late.request
            if request.ended:
                self.executor.cancel(late.task)
            elif late.task.done:
                request.stalled = False
                yield late
            else:
                self._rows.append(late)

    @property
    def next_due(self) -> float | None:
        """When the next row has waited too long; None if `overdue` has seen none yet."""
        since = (late.since for late in self._rows if late.since is not None)
        first = min(since, default=None)
        return None if first is None else first + self._timeout_s

    def overdue(self, now: float) -> Iterator[tuple[Request, Overloaded]]:
        for late in self._rows:
            late.since = now if late.since is None else late.since
            if now - late.since > self._timeout_s:
                message = f"grammar: matching a token takes longer than {self._timeout_s:g} s"
                yield late.request, Overloaded(message, retry_after_s=_RETRY_AFTER_S)
