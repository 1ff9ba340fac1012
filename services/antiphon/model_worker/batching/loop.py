"""The batching loop: a thread that plans, launches and commits one step after the other."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Generic

import msgspec
import numpy as np

from antiphon.model_worker.batching.faults import RequestFault, raise_if_shared
from antiphon.model_worker.batching.mailbox import NOTHING, ControlCommand, Mail, Mailbox
from antiphon.model_worker.batching.page_budget import Capacity
from antiphon.model_worker.batching.plan import (
    PLAIN,
    DeviceLost,
    Flight,
    Launcher,
    SamplingPart,
    StepOutcome,
)
from antiphon.model_worker.batching.state import AnyProgress, ChoiceKey, CoreTotals
from antiphon.model_worker.batching.step_core import Rows
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
from antiphon.wire.kv_events import KvEvent

if TYPE_CHECKING:
    from antiphon.model_worker.batching.step_core import StepCore

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 1e-4
"""How long a thread may hold the GIL. Python's default, 5 ms, is longer than a step of a small
model: the event loop would run in the gaps only."""

CAPACITY_PERIOD_S = 0.5
"""Maximum age of the capacity in a report; heartbeats, which carry it, are further apart."""


class StepReport(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one turn of the loop did, and the state of the engine after it.

    `step` and `failures` are counted since start; `capacity` is recent.
    """

    step: int  # plans launched
    seconds: float = 0.0  # duration of the step; 0 in a turn that launched none
    tokens: int = 0  # in the launched plan
    rows: int = 0
    progress: Sequence[AnyProgress]  # in its order
    capacity: Capacity
    totals: CoreTotals
    prefill_rows: int = 0
    prefill_tokens: int = 0
    failures: int = 0  # plans and drafts that raised
    paused: bool = False
    done: tuple[ControlDone, ...] = ()  # replies to the applied commands, in their order
    events: tuple[KvEvent, ...] = ()
    started: tuple[ChoiceKey, ...] = ()  # for the first time
    prompt_tokens: int = 0  # of these
    cached_tokens: int = 0  # of these prompts
    returned: tuple[ChoiceKey, ...] = ()  # never started, and dropped for another worker to run


class LaunchedStep(msgspec.Struct, Generic[Rows]):
    """A plan that was launched and whose outcome was not read yet.

    Attributes:
        record: None if the plan could not be built or launched.
        awaits_part: Whether its sampling part is to follow.
        error: Why it counts as failed, whatever its outcome.
    """

    step: int
    rows: Rows
    record: StepRecord | None = None
    flight: Flight | None = None
    awaits_part: bool = False
    error: Exception | None = None

    def outcome(self) -> StepOutcome:
        """Wait for the outcome; raises why the plan failed."""
        outcome = None if self.flight is None else self.flight.outcome()
        if self.error is not None:
            raise self.error
        assert outcome is not None, "a plan that was not launched has failed"
        return outcome


class BatchingLoop(Generic[Rows]):
    """Turns mail into steps and steps into reports, until the mailbox is closed.

    So many steps are launched `ahead`, before the outcomes of those before them are read. What a
    row may sample can depend on tokens in flight: the sampling part of such a plan follows when all
    plans before it are committed, while its forward pass is computed. `deliver` receives every
    report, in order, in the loop's thread. While there is nothing to do, `prepare` is called for
    short work ahead of later steps, until it says that none is left or a request times out.

    A plan that cannot be built or raises is run again in halves until the request at fault is
    alone. A request that cannot be added, planned or committed ends alone; where the fault cannot
    be attributed, the requests of the step end. Only a lost device, and broken pages or a broken
    radix tree, which all requests share, leave `run` and end the process.

    The report of a step is delivered when the next plan is about to be computed, or at once if one
    is in flight already or none follows. The event loop then wakes up while kernels run, which do
    not hold the GIL; any sooner, and two threads would contend for it between two steps, when
    nothing is computed.
    """

    def __init__(
        self,
        core: StepCore[Rows],
        launcher: Launcher,
        mailbox: Mailbox,
        deliver: Callable[[StepReport], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        ahead: int = 0,
        prepare: Callable[[], bool] = lambda: False,
    ) -> None:
        self.recorder = FlightRecorder(core.cache_groups)
        self.progress_count = 0  # of what the loop begins; 0 while it is idle. For a watchdog
        self.thread: int | None = None  # its identifier, once it runs
        self.reading: StepRecord | None = None  # the plan whose outcome is read, or was last
        self._native_thread: int | None = None
        self.paused = False
        self._core = core
        self._launcher = launcher
        self._mailbox = mailbox
        self._deliver = deliver
        self._clock = clock
        self._ahead = ahead
        self._prepare = prepare
        self._flights = deque[LaunchedStep[Rows]]()
        self._undelivered: StepReport | None = None
        self._capacity = core.capacity()
        self._capacity_due_s = 0.0
        self._step = 0
        self._beats = 0
        self._failures = 0

    def use(self, launcher: Launcher, *, ahead: int) -> None:
        """Launch by another launcher from here on, so many steps ahead. Only before `run`."""
        self._finish_steps()
        self._launcher.wait()
        self._launcher, self._ahead = launcher, ahead

    @property
    def native_threads(self) -> tuple[int, ...]:
        """The system's identifiers of the loop's thread and that of its forward passes."""
        forward = self._launcher.thread
        both = (self._native_thread, None if forward is None else forward.native_id)
        return tuple(each for each in both if each)

    @property
    def forward_thread(self) -> int | None:
        """The identifier of the thread of the forward passes, if it is not the loop's."""
        return None if self._launcher.thread is None else self._launcher.thread.ident

    def run(self) -> None:
        """Run until the mailbox is closed. The body of the loop's thread."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self.thread, self._native_thread = threading.get_ident(), threading.get_native_id()
        while (mail := self._take()) is not None:
            report = self.turn(mail)
            self._deliver_report()  # of the turn before, if this one has computed nothing
            self._undelivered = report
            if self._flights or self.paused or not self._core.can_plan:
                self._deliver_report()
        self._finish_steps()
        self._deliver_report()
        self._launcher.close()  # else its thread holds the model, and may still draft at exit
        self.progress_count = 0

    def turn(self, mail: Mail) -> StepReport:
        """Apply mail, then launch a step and read the oldest, if there are any."""
        core, now = self._core, self._clock()
        returned = self._apply(mail, now) if mail is not NOTHING else ()
        done = self._apply_commands(mail.commands) if mail.commands else ()
        if mail.tower is not None:
            self._finish_steps()
            core.use_tower(mail.tower)
        rows = self._next_rows(now)
        count = 0 if rows is None else len(rows)
        began = time.perf_counter()
        tokens = self._run_step(rows if count else None)
        seconds = time.perf_counter() - began if count else 0.0
        prefill_rows = 0 if rows is None else rows.prefill_rows
        started = core.take_started()
        capacity = self._measure_capacity(now, anew=bool(started))
        return StepReport(
            step=self._step,
            seconds=seconds,
            tokens=tokens,
            rows=count,
            progress=core.take_progress(),
            capacity=capacity,
            totals=core.totals(),
            prefill_rows=prefill_rows,
            prefill_tokens=rows.prefill_tokens if rows is not None and prefill_rows else 0,
            failures=self._failures + self._launcher.draft_failures,
            paused=self.paused,
            done=done,
            events=core.take_events(),
            started=tuple([request.key for request in started]) if started else (),
            prompt_tokens=sum([request.prompt_tokens for request in started]) if started else 0,
            cached_tokens=sum([request.cached_tokens for request in started]) if started else 0,
            returned=returned,
        )

    def _deliver_report(self) -> None:
        report, self._undelivered = self._undelivered, None
        if report is not None:
            self._deliver(report)

    def _apply(self, mail: Mail, now: float) -> tuple[ChoiceKey, ...]:
        """Add and drop choices; return those that were dropped for another worker to run."""
        core = self._core
        for done in mail.landed:
            core.land(done)
        # First: the places in the queue that they free are counted on by those who sent the runs.
        for key, kept in mail.drops.items():
            with self._guard(key):
                core.drop(key, kept)
        for key, (state, matcher) in mail.runs.items():
            with self._guard(key):
                core.add(key, state, now, matcher)
        returned: list[ChoiceKey] = []
        for keys in mail.requeues:
            with self._guard(*keys):
                if core.requeue(keys):
                    returned += keys
        return tuple(returned)

    @contextmanager
    def _guard(self, *keys: ChoiceKey) -> Generator[None]:
        try:
            yield
        except Exception as error:
            raise_if_shared(error)
            log.exception("choice failed")
            for key in keys:
                self._failures += 1
                self._core.fail_choice(key, Internal("internal error"))

    def _next_rows(self, now: float) -> Rows | None:
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
        return None

    def _measure_capacity(self, now: float, *, anew: bool) -> Capacity:
        """The capacity, measured when it is due: that costs as much as building a short plan.

        `anew` measures it at once: a request takes most of its pages when it starts, and the log
        would show an empty cache beside a running request.
        """
        if anew or now >= self._capacity_due_s or self._core.idle:
            self._capacity_due_s = now + CAPACITY_PERIOD_S
            self._capacity = self._core.capacity()
        return self._capacity

    def _take(self) -> Mail | None:
        idle = not self._flights and (self.paused or self._core.idle or self._core.starved)
        if idle:
            self.progress_count = 0
        # Requests may time out during a pause.
        due = self._core.next_due if idle else None
        while idle and not self._mailbox.has_news and (due is None or self._clock() < due):
            if not self._prepare():
                break
        timeout_s = None if due is None else max(0.0, due - self._clock())
        mail = self._mailbox.take(wait=idle, timeout_s=timeout_s)
        self._beat()
        return mail

    def _beat(self) -> None:
        self._beats += 1
        self.progress_count = self._beats

    def _apply_commands(self, commands: Sequence[ControlCommand]) -> tuple[ControlDone, ...]:
        """Apply commands while nothing is in flight, so that they mean the same with overlap."""
        self._finish_steps()
        return tuple(map(self._apply_command, commands))

    def _apply_command(self, command: ControlCommand) -> ControlDone:
        core = self._core
        match command:
            case FlushCache():
                return ControlDone(pages_freed=core.flush())
            case PauseWorker():
                self.paused = True
                return ControlDone(requests=core.prepare_pause(command.mode))
            case ContinueWorker():
                self.paused = False
                return ControlDone()
            case SetWeightVersion():
                mode = PauseMode.ABORT if command.abort_all else PauseMode.IN_PLACE
                requests = core.prepare_pause(mode)
                return ControlDone(
                    pages_freed=core.set_weight_version(command.version), requests=requests
                )

    def _run_step(self, rows: Rows | None) -> int:
        """Launch these rows, then read the oldest step, unless more may be launched ahead of it.

        None: there are none. Returns the number of their tokens.
        """
        tokens = 0
        if rows is not None:
            launched = self._launch(rows)
            self._flights.append(launched)
            if launched.record is None:
                self._finish_steps()  # the next rows would rest on what is never computed
                return 0
            tokens = len(launched.record.plan.tokens)
        if len(self._flights) > (0 if rows is None else self._ahead):
            self._finish_step(self._flights.popleft())
        if self._flights:
            self._sample(self._flights[0])
        return tokens

    def _finish_steps(self) -> None:
        while self._flights:
            self._finish_step(self._flights.popleft())

    def _launch(self, rows: Rows) -> LaunchedStep[Rows]:
        self._step += 1
        self._beat()
        core = self._core
        launched = LaunchedStep(self._step, rows)
        try:
            # Sampling parts are made in order: each reckons with the ones before it.
            launched.awaits_part = bool(self._flights) and (
                self._flights[-1].awaits_part or core.part_follows(rows)
            )
            part = None if launched.awaits_part else core.part(rows)
            plan = core.build_plan(self._step, rows, part)
            launched.flight = self._launcher.launch(plan)
        except Exception as error:  # noqa: BLE001  # logged where the outcome is read
            raise_if_shared(error)
            self._step -= 1  # no runner is ever given this step: the next plan has its changes
            launched.error = error
            return launched
        core.launched(plan.step)
        launched.record = self.recorder.begin(plan)
        return launched

    def _sample(self, launched: LaunchedStep[Rows]) -> None:
        """Give the oldest step its sampling part, if that is to follow."""
        if not launched.awaits_part or launched.flight is None:
            return
        part = PLAIN
        try:
            part = self._core.part(launched.rows)
        except Exception as error:  # noqa: BLE001  # logged where the outcome is read
            raise_if_shared(error)
            launched.error = error
        self._complete(launched, part)

    def _complete(self, launched: LaunchedStep[Rows], part: SamplingPart) -> None:
        """Give a step this sampling part, if it has none."""
        record, flight = launched.record, launched.flight
        if not launched.awaits_part or record is None or flight is None:
            return
        launched.awaits_part = False
        self.recorder.complete(record, part)
        flight.sample(part)

    def _finish_step(self, launched: LaunchedStep[Rows]) -> None:
        """Wait for a plan and commit it; if it failed, find the request at fault."""
        if (outcome := self._read(launched)) is not None:
            self._commit(launched.rows, outcome)
            if launched.flight is not None:
                self._core.note_drafts(launched.rows, launched.flight.drafts)
            return
        invalid = list(self._flights)
        self._flights.clear()
        for later in invalid:
            # Nothing that it samples counts, and its own part may rest on drafts never made.
            self._complete(later, PLAIN)
            self._read(later)
            if later.record is not None:
                later.record.invalidate()
        self._bisect(launched.rows)
        for later in invalid:
            self._core.discard_launched(later.rows)

    def _bisect(self, rows: Rows) -> None:
        """Run the rows of a failed plan again, in halves, until the request at fault is alone."""
        error, core = Internal("the step of this request failed"), self._core
        # A row that is alone because the others have ended since has yet to fail by itself.
        alone, current = len(rows) == 1, core.is_current(rows)
        if not current.all():
            core.discard_launched(rows.take(np.flatnonzero(~current)))
            rows = rows.take(np.flatnonzero(current))
        if alone or not len(rows):
            core.fail(rows, error)
            return
        rows = core.repeat(rows)
        index, middle = np.arange(len(rows)), len(rows) // 2
        for half in filter(len, (rows.take(index[:middle]), rows.take(index[middle:]))):
            launched = self._launch(half)
            if (outcome := self._read(launched)) is not None:
                self._commit(half, outcome)
            else:
                self._bisect(half)

    def _commit(self, rows: Rows, outcome: StepOutcome) -> None:
        """Commit a plan; if that fails as a whole, its requests end."""
        try:
            self._core.commit(rows, outcome)
        except Exception as error:
            raise_if_shared(error)
            log.exception("commit failed", extra={"step": outcome.step, "rows": len(rows)})
            self._failures += 1
            self._core.fail_committed(rows, Internal("internal error"))

    def _read(self, launched: LaunchedStep[Rows]) -> StepOutcome | None:
        """Wait for a plan; None if it failed."""
        self._deliver_report()
        step, record = launched.step, launched.record
        self.reading = record
        try:
            self._sample(launched)
            outcome = launched.outcome()
            assert outcome.step == step, "the outcome belongs to another plan"
        except DeviceLost:
            raise
        except Exception as error:
            # An outermost boundary of the process: whatever a kernel raises ends the request at
            # fault, with the traceback here, and not the service.
            log.exception("plan failed", extra={"step": step, "rows": len(launched.rows)})
            self._failures += 1
            if record is not None:
                record.failure = f"{type(error).__name__}: {error}"
                self._core.finished(step)
            return None
        assert record is not None, "a plan that was not built has no outcome"
        record.end(outcome)
        self._core.finished(step)
        return outcome
