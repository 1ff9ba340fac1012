"""Flights: plans that are computed in the loop's thread, or in a thread of their own."""

from __future__ import annotations

import logging
from queue import SimpleQueue
from threading import Lock, Thread
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np

from antiphon.model_worker.batching.plan import DeviceLost

if TYPE_CHECKING:
    from antiphon.model_worker.batching.plan import (
        Ints,
        PlanRunner,
        SamplingPart,
        StepOutcome,
        StepPlan,
    )


log = logging.getLogger(__name__)

T = TypeVar("T")


class Drafting:
    """Makes the drafts after plans. A failure costs these drafts, which are token 0 then."""

    def __init__(self, runner: PlanRunner) -> None:
        self._runner = runner
        self.failures = 0

    def make(self, plan: StepPlan) -> Ints:
        """Make the drafts after a plan, which asks for some  ->  (R, K).

        Raises:
            DeviceLost: No plan can be computed any more.
        """
        counts = plan.draft_counts
        assert counts is not None, "the plan asks for no drafts"
        try:
            return self._runner.make_drafts()
        except DeviceLost:
            raise
        except Exception:
            self.failures += 1
            log.exception("drafting failed", extra={"step": plan.step})
            return np.zeros((len(counts), counts.max(initial=0)), np.int32)


class InTurn:
    """Computes a plan when its outcome is read, and its drafts when the next one is computed."""

    thread: Thread | None = None

    def __init__(self, runner: PlanRunner) -> None:
        self._runner = runner
        self._drafting = Drafting(runner)
        self._undrafted: InTurnFlight | None = None

    def launch(self, plan: StepPlan) -> InTurnFlight:
        return InTurnFlight(self, plan)

    @property
    def draft_failures(self) -> int:
        return self._drafting.failures

    def wait(self) -> None:
        if self._undrafted is not None:
            self._undrafted.drafts()

    def close(self) -> None:
        pass

    def run(self, flight: InTurnFlight, plan: StepPlan) -> StepOutcome:
        self.wait()
        outcome = self._runner.run(plan)
        if plan.draft_counts is not None:
            self._undrafted = flight
        return outcome

    def make_drafts(self, plan: StepPlan) -> Ints:
        self._undrafted = None
        return self._drafting.make(plan)


class InTurnFlight:
    def __init__(self, launcher: InTurn, plan: StepPlan) -> None:
        self._launcher = launcher
        self._plan = plan
        self._drafts: Ints | None = None

    def sample(self, part: SamplingPart) -> None:
        self._plan = msgspec.structs.replace(self._plan, part=part)

    def outcome(self) -> StepOutcome:
        return self._launcher.run(self, self._plan)

    def drafts(self) -> Ints:
        if self._drafts is None:
            self._drafts = self._launcher.make_drafts(self._plan)
        return self._drafts


class ForwardThread:
    """Computes plans in a thread of its own, which begins with the first one."""

    def __init__(self, runner: PlanRunner) -> None:
        self._runner = runner
        self._drafting = Drafting(runner)
        self._flights = SimpleQueue[ThreadFlight | None]()
        self._last: ThreadFlight | None = None
        self.thread: Thread | None = None

    @property
    def draft_failures(self) -> int:
        return self._drafting.failures

    def launch(self, plan: StepPlan) -> ThreadFlight:
        if self.thread is None:
            # Of a process that ends by an error it may still compute, or wait for a sampling part.
            thread = Thread(target=self._run, name="forward", daemon=True)
            thread.start()
            self.thread = thread
        self._last = ThreadFlight(plan)
        self._flights.put(self._last)
        return self._last

    def wait(self) -> None:
        if self._last is not None:
            self._last.wait()

    def close(self) -> None:
        """End the thread after the launched plans, each of which must have its sampling part."""
        if self.thread is not None:
            self._flights.put(None)
            self.thread.join()
            self.thread = None

    def _run(self) -> None:
        while (flight := self._flights.get()) is not None:
            flight.compute(self._runner, self._drafting)


class ThreadFlight:
    def __init__(self, plan: StepPlan) -> None:
        self._plan = plan
        self._part: SamplingPart | None = None
        self._outcome: StepOutcome | BaseException | None = None
        self._drafts: Ints | BaseException | None = None
        # Locks as events that happen once: a `threading.Event` takes ten times as long.
        self._sampling, self._landed, self._drafted = Lock(), Lock(), Lock()
        for lock in (self._sampling, self._landed, self._drafted):
            lock.acquire()

    def compute(self, runner: PlanRunner, drafting: Drafting) -> None:
        """Compute the plan and its drafts, in the forward thread."""
        try:
            part = None if self._plan.part is not None else self._given
            self._outcome = runner.run(self._plan, part)
        except BaseException as error:  # noqa: BLE001  # raised where the outcome is read
            self._outcome = self._drafts = error
        self._landed.release()
        if self._drafts is None and self._plan.draft_counts is not None:
            try:
                self._drafts = drafting.make(self._plan)
            except BaseException as error:  # noqa: BLE001  # raised where the drafts are read
                self._drafts = error
        self._drafted.release()

    def sample(self, part: SamplingPart) -> None:
        self._part = part
        self._sampling.release()

    def outcome(self) -> StepOutcome:
        self._landed.acquire()
        return _or_raise(self._outcome)

    def drafts(self) -> Ints:
        self.wait()
        return _or_raise(self._drafts)

    def wait(self) -> None:
        """Wait until all of it is computed."""
        with self._drafted:
            pass

    def _given(self) -> SamplingPart:
        self._sampling.acquire()
        assert self._part is not None, "a sampling part was given"
        return self._part


def _or_raise(found: T | BaseException | None) -> T:
    assert found is not None, "what was waited for is there"
    if isinstance(found, BaseException):
        raise found
    return found
