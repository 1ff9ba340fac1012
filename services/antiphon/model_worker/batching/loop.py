"""The batching loop: a thread that plans, launches and commits, one step after the other."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from antiphon.model_worker.batching.builder import BatchRow, build_plan
from antiphon.model_worker.batching.capacity import Capacity
from antiphon.model_worker.batching.faults import RequestFault, raise_if_shared
from antiphon.model_worker.batching.mailbox import NOTHING
from antiphon.model_worker.batching.plan import StepOutcome
from antiphon.model_worker.batching.queue import Backlog
from antiphon.model_worker.batching.request import ChoiceKey, Progress
from antiphon.model_worker.batching.runner import OverlapRunner
from antiphon.model_worker.batching.steady import Drawn, SteadyRows
from antiphon.model_worker.cache.events import CacheEvent
from antiphon.model_worker.observability.flight_recorder import FlightRecorder, StepRecord
from antiphon.wire.command import (
    ContinueWorker,
    ControlDone,
    FlushCache,
    PauseMode,
    PauseWorker,
    SetWeightVersion,
)
from antiphon.wire.errors import Internal

if TYPE_CHECKING:
    from antiphon.model_worker.batching.engine_core import EngineCore
    from antiphon.model_worker.batching.mailbox import ControlCommand, Mail, Mailbox
    from antiphon.model_worker.batching.plan import StepPlan
    from antiphon.model_worker.batching.runner import PlanRunner

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 1e-4
"""How long a thread may keep the interpreter from the other one. Python's default, 5 ms, is longer
than a step of a small model: the bus side would run in the gaps only."""

CAPACITY_PERIOD_S = 0.5
"""How old the credit in a report may be; heartbeats, which tell it on, are further apart."""


class StepReport(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one turn of the loop did, and how things stand after it.

    Attributes:
        step: Plans launched since start.
        seconds: Of the turn's step; 0 in a turn that launched none.
        tokens: Tokens in the plan that was launched.
        rows: Choices in it.
        credit: What could be taken on, lately.
        prefill_rows: Of the choices in the plan, those whose prompts it computes.
        prefill_tokens: Tokens of these.
        retractions: Since start.
        retracted_tokens: Tokens that these had in the cache, since start.
        retracted_prompt_tokens: Of those, the prompts'.
        new_token_ratio: Share of the longest answers for which pages are kept free.
        preemptions: Since start.
        failures: Plans that raised, since start.
        paused: Whether steps are run.
        done: Replies to the orders that the turn has obeyed, in their order.
        events: Blocks that came into the prefix cache and went from it.
        started: Choices that run for the first time.
        prompt_tokens: Of theirs.
        cached_tokens: Of those, how many the cache had.
        backlog: What waits, lately.
        returned: Choices that were given up, as was asked, because they were never started.
        evicted_tokens: Tokens that the prefix cache has given up since start.
    """

    step: int
    seconds: float = 0.0
    tokens: int = 0
    rows: int = 0
    progress: Sequence[Progress]
    credit: Capacity
    running: int
    waiting: int
    prefill_rows: int = 0
    prefill_tokens: int = 0
    retractions: int
    retracted_tokens: int = 0
    retracted_prompt_tokens: int = 0
    new_token_ratio: float = 0.0
    preemptions: int = 0
    failures: int = 0
    paused: bool = False
    done: tuple[ControlDone, ...] = ()
    events: tuple[CacheEvent, ...] = ()
    started: tuple[ChoiceKey, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    backlog: Backlog = Backlog()
    returned: tuple[ChoiceKey, ...] = ()
    evicted_tokens: int = 0

    @property
    def steady(self) -> bool:
        """Whether it tells of nothing but a token for each of the choices that went on."""
        if not isinstance(self.progress, Drawn):
            return False
        return not (self.started or self.events or self.done or self.returned)


class LaunchedStep(msgspec.Struct, frozen=True):
    """A plan that was launched and whose outcome was not read yet.

    Attributes:
        record: Of the plan; None if it could not be built, which shows where it is read.
    """

    step: int
    rows: Sequence[BatchRow]
    record: StepRecord | None
    outcome: Callable[[], StepOutcome]


class BatchingLoop:
    """Turns mail into steps and steps into reports, until the mailbox is closed.

    With `overlap` a step is launched before the outcome of the one before it is read. `deliver`
    gets every report, in order, in the loop's thread. A plan that cannot be built or raises is run
    again in halves until the request at fault is alone. A request that cannot be taken in, planned
    or committed ends alone; where the fault cannot be attributed, the requests of the step end.
    Only broken pages or a broken prefix tree, which all requests share, leave `run` and end the
    process.

    The report of a step is delivered when the next plan is about to be computed, or at once if one
    is in flight already or none follows. Whom that wakes up does so while kernels run, which leave
    the interpreter alone; any sooner, and two threads would contend for it between two steps, when
    nothing is computed.

    Attributes:
        recorder: The last plans.
        pulse: Grows with whatever the loop begins; 0 while it rests. For a watchdog.
        thread: Which thread it runs in, once it does.
        native_thread: The same by the system's number.
        paused: Whether it runs no steps.
    """

    def __init__(
        self,
        core: EngineCore,
        runner: PlanRunner,
        mailbox: Mailbox,
        deliver: Callable[[StepReport], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        overlap: bool = False,
    ) -> None:
        self.recorder = FlightRecorder()
        self.progress_count = 0
        self.thread: int | None = None
        self.native_thread: int | None = None
        self.paused = False
        self._core = core
        self._launch_plan = _launcher(runner, overlap=overlap)
        self._mailbox = mailbox
        self._deliver = deliver
        self._clock = clock
        self._overlap = overlap
        self._launched: LaunchedStep | None = None
        self._undelivered: StepReport | None = None
        self._capacity = core.capacity()
        self._backlog = core.waiting.backlog()
        self._capacity_due_s = 0.0
        self._step = 0
        self._beats = 0
        self._failures = 0

    def run(self) -> None:
        """Go on until the mailbox is closed. The body of the loop's thread."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self.thread, self.native_thread = threading.get_ident(), threading.get_native_id()
        while (mail := self._take()) is not None:
            report = self.turn(mail)
            self._deliver_report()  # that of the turn before, if this one has computed nothing
            self._undelivered = report
            if self._launched is not None or self.paused or not self._core.can_plan:
                self._deliver_report()
        self._deliver_report()
        self.progress_count = 0

    def turn(self, mail: Mail) -> StepReport:
        """Apply mail, then launch one step and read one, if there are any."""
        batching, now = self._core, self._clock()
        returned = self._apply(mail, now) if mail is not NOTHING else ()
        done = self._apply_commands(mail.commands) if mail.commands else ()
        rows = self._next_rows(now)
        began = time.perf_counter()
        tokens = self._run_step(rows)
        seconds = time.perf_counter() - began if rows else 0.0
        started = batching.take_started()
        # May end a request, whose end is part of the progress.
        credit = self._measure_capacity(now, anew=bool(started))
        prefill_rows = _prefill_rows(rows, tokens, len(started))
        return StepReport(
            step=self._step,
            seconds=seconds,
            tokens=tokens,
            rows=len(rows),
            progress=batching.take_progress(),
            credit=credit,
            running=len(batching.running),
            waiting=len(batching.waiting),
            prefill_rows=prefill_rows,
            prefill_tokens=tokens - (len(rows) - prefill_rows) if prefill_rows else 0,
            retractions=batching.retractions,
            retracted_tokens=batching.retracted_tokens,
            retracted_prompt_tokens=batching.retracted_prompt_tokens,
            new_token_ratio=batching.new_token_ratio,
            preemptions=batching.preemptions,
            failures=self._failures,
            paused=self.paused,
            done=done,
            events=batching.index.take_events(),
            started=tuple([request.key for request in started]) if started else (),
            prompt_tokens=sum([request.prompt_tokens for request in started]) if started else 0,
            cached_tokens=sum([request.cached_tokens for request in started]) if started else 0,
            backlog=self._backlog,
            returned=returned,
            evicted_tokens=batching.index.evicted_tokens,
        )

    def _deliver_report(self) -> None:
        report, self._undelivered = self._undelivered, None
        if report is not None:
            self._deliver(report)

    def _apply(self, mail: Mail, now: float) -> tuple[ChoiceKey, ...]:
        """Take in and drop choices; return those that were given up, as was asked."""
        batching = self._core
        for key, state in mail.runs:
            try:
                batching.add(key, state, now, mail.matchers.get(key))
            except Exception as error:  # noqa: BLE001  # logged there
                self._end_choice(key, error)
        for key, kept in mail.drops.items():
            try:
                batching.drop(key, kept)
            except Exception as error:  # noqa: BLE001  # logged there
                self._end_choice(key, error)
        returned: list[ChoiceKey] = []
        for keys in mail.requeues:
            try:
                if batching.requeue(keys):
                    returned += keys
            except Exception as error:  # noqa: BLE001  # logged there
                for key in keys:
                    self._end_choice(key, error)
        return tuple(returned)

    def _end_choice(self, key: ChoiceKey, error: Exception) -> None:
        """End a choice that could not be taken in or dropped."""
        raise_if_shared(error)
        log.error("choice failed", exc_info=error)
        self._failures += 1
        self._core.fail_choice(key, Internal("internal error"))

    def _next_rows(self, now: float) -> Sequence[BatchRow]:
        try:
            if not self.paused:
                return self._core.next_rows(now)
            self._core.expire(now)
        except Exception as error:
            raise_if_shared(error)
            log.exception("planning failed")
            self._failures += 1
            at_fault = error.request if isinstance(error, RequestFault) else None
            self._core.fail_planned(at_fault, Internal("internal error"))
        return ()

    def _measure_capacity(self, now: float, *, anew: bool) -> Capacity:
        """What could be taken on, counted when it is due: it costs as much as a short plan.

        `anew` counts it at once: a request that starts takes most of its pages then, and lines of
        the log would show an empty cache beside a running request.
        """
        if anew or now >= self._capacity_due_s or self._core.idle:
            self._capacity_due_s = now + CAPACITY_PERIOD_S
            self._capacity = self._core.capacity()
            self._backlog = self._core.waiting.backlog()
        return self._capacity

    def _take(self) -> Mail | None:
        rests = self._launched is None and (self.paused or self._core.idle)
        if rests:
            self.progress_count = 0
        # Whoever waits out a pause may run out of time meanwhile.
        due = self._core.next_due if rests else None
        timeout_s = None if due is None else max(0.0, due - self._clock())
        mail = self._mailbox.take(wait=rests, timeout_s=timeout_s)
        self._beat()
        return mail

    def _beat(self) -> None:
        self._beats += 1
        self.progress_count = self._beats

    def _apply_commands(self, orders: Sequence[ControlCommand]) -> tuple[ControlDone, ...]:
        """Obey orders while nothing is in flight, so that they mean the same with overlap."""
        landed, self._launched = self._launched, None
        if landed is not None:
            self._finish_step(landed)
        return tuple(map(self._apply_command, orders))

    def _apply_command(self, order: ControlCommand) -> ControlDone:
        batching = self._core
        match order:
            case FlushCache():
                return ControlDone(pages_freed=batching.flush())
            case PauseWorker():
                self.paused = True
                return ControlDone(requests=batching.prepare_pause(order.mode))
            case ContinueWorker():
                self.paused = False
                return ControlDone()
            case SetWeightVersion():
                mode = PauseMode.ABORT if order.abort_all else PauseMode.IN_PLACE
                met = batching.prepare_pause(mode)
                return ControlDone(
                    pages_freed=batching.set_weight_version(order.version), requests=met
                )

    def _run_step(self, rows: Sequence[BatchRow]) -> int:
        """Launch these rows, then read what was launched before them; or they, without overlap.

        Return how many tokens they have.
        """
        landed, self._launched = self._launched, self._launch(rows) if rows else None
        record = None if self._launched is None else self._launched.record
        tokens = 0 if record is None else len(record.plan.tokens)
        if not self._overlap:
            landed, self._launched = self._launched, None
        if landed is not None:
            self._finish_step(landed)
        return tokens

    def _launch(self, rows: Sequence[BatchRow]) -> LaunchedStep:
        self._step += 1
        self._beat()
        try:
            if isinstance(rows, SteadyRows):
                plan = rows.plan(self._step)
            else:
                plan = build_plan(self._step, rows, self._core.slots)
        except Exception as error:  # noqa: BLE001  # shown where the outcome is read
            raise_if_shared(error)
            self._step -= 1  # no runner is ever given this step
            return LaunchedStep(self._step, rows, None, partial(_raise, error))
        record = self.recorder.begin(plan)
        self._core.pools.launched(plan.step)
        return LaunchedStep(self._step, rows, record, self._launch_plan(plan))

    def _finish_step(self, flight: LaunchedStep) -> None:
        """Wait for a plan and commit it; if it failed, find out who is to blame."""
        outcome = self._read(flight)
        if outcome is not None:
            self._commit(flight.rows, outcome)
            return
        spoiled, self._launched = self._launched, None
        if spoiled is not None:
            self._read(spoiled)
            if spoiled.record is not None:
                spoiled.record.invalidate()
        self._bisect(flight.rows)
        if spoiled is not None:
            self._core.discard_launched(spoiled.rows)

    def _bisect(self, rows: Sequence[BatchRow]) -> None:
        """Run the rows of a plan that failed again, in halves, until whoever fails is alone."""
        error = Internal("the step of this request failed")
        self._core.fail([row for row in rows if not row.current], error)
        rows = [row for row in rows if row.current]
        if len(rows) <= 1:
            self._core.fail(rows, error)
            return
        for row in rows:
            row.repeat()
        middle = len(rows) // 2
        for half in (rows[:middle], rows[middle:]):
            flight = self._launch(half)
            outcome = self._read(flight)
            if outcome is not None:
                self._commit(half, outcome)
            else:
                self._bisect(half)

    def _commit(self, rows: Sequence[BatchRow], outcome: StepOutcome) -> None:
        """Commit a plan; if that fails as a whole, its requests end."""
        try:
            self._core.commit(rows, outcome)
        except Exception as error:
            raise_if_shared(error)
            log.exception("commit failed", extra={"step": outcome.step, "rows": len(rows)})
            self._failures += 1
            self._core.fail_committed(rows, Internal("internal error"))

    def _read(self, flight: LaunchedStep) -> StepOutcome | None:
        """Wait for a plan; nothing if it raised."""
        self._deliver_report()
        step, record = flight.step, flight.record
        try:
            outcome = flight.outcome()
            assert outcome.step == step, "the outcome is another plan's"
        except Exception as error:
            # One of the process's outermost borders: whatever a kernel raises ends the request
            # that it is to blame on, with the traceback here, and not the service.
            log.exception("plan failed", extra={"step": step, "rows": len(flight.rows)})
            self._failures += 1
            if record is not None:
                record.failure = f"{type(error).__name__}: {error}"
                self._core.pools.finished(step)
            return None
        assert record is not None, "what was not built has no outcome"
        record.end(outcome)
        self._core.pools.finished(step)
        return outcome


def _prefill_rows(rows: Sequence[BatchRow], tokens: int, started: int) -> int:
    """Rows of a plan that compute prompts. A decode has one token, as may the end of a prompt."""
    if tokens == len(rows):
        return min(started, len(rows))
    return max(started, sum([row.length > 1 for row in rows]))


def _launcher(
    runner: PlanRunner, *, overlap: bool
) -> Callable[[StepPlan], Callable[[], StepOutcome]]:
    """What begins a plan and returns what waits for its outcome."""
    if not overlap:
        return lambda plan: partial(runner.run, plan)
    assert isinstance(runner, OverlapRunner), "this runner does not compute apart"
    return partial(_launch_overlapped, runner)


def _launch_overlapped(runner: OverlapRunner, plan: StepPlan) -> Callable[[], StepOutcome]:
    try:
        return runner.launch(plan)
    except Exception as error:  # noqa: BLE001  # told where the outcome would have been
        return partial(_raise, error)


def _raise(error: Exception) -> StepOutcome:
    raise error
