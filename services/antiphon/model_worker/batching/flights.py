"""Flights: plans that are computed in the loop's thread, or in a thread of their own."""

from __future__ import annotations

from queue import SimpleQueue
from threading import Lock, Thread
from typing import TYPE_CHECKING, TypeVar

import msgspec

if TYPE_CHECKING:
    from antiphon.model_worker.batching.plan import (
        Ints,
        PlanRunner,
        SamplingPart,
        StepOutcome,
        StepPlan,
    )


T = TypeVar("T")


class InTurn:
    """Computes a plan when its outcome is read, and its drafts when the next one is computed."""

    native_thread: int | None = None

    def __init__(self, runner: PlanRunner) -> None:
        self._runner = runner
        self._undrafted: InTurnFlight | None = None

    def launch(self, plan: StepPlan) -> InTurnFlight:
        return InTurnFlight(self, plan)

    def settle(self) -> None:
        if self._undrafted is not None:
            self._undrafted.drafts()

    def close(self) -> None:
        pass

    def run(self, flight: InTurnFlight, plan: StepPlan) -> StepOutcome:
        self.settle()
        outcome = self._runner.run(plan)
        if plan.draft_counts is not None:
            self._undrafted = flight
        return outcome

    def make_drafts(self) -> Ints:
        self._undrafted = None
        return self._runner.make_drafts()


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
            self._drafts = self._launcher.make_drafts()
        return self._drafts


class ForwardThread:
    """Computes plans in a thread of its own, which begins with the first one."""

    def __init__(self, runner: PlanRunner) -> None:
        self._runner = runner
        self._flights = SimpleQueue[ThreadFlight | None]()
        self._thread: Thread | None = None
        self._last: ThreadFlight | None = None
        self.native_thread: int | None = None

    def launch(self, plan: StepPlan) -> ThreadFlight:
        if self._thread is None:
            self._thread = Thread(target=self._run, name="forward", daemon=True)
            self._thread.start()
            self.native_thread = self._thread.native_id
        self._last = ThreadFlight(plan)
        self._flights.put(self._last)
        return self._last

    def settle(self) -> None:
        if self._last is not None:
            self._last.wait()

    def close(self) -> None:
        """End the thread after the launched plans, each of which must have its sampling part."""
        if self._thread is not None:
            self._flights.put(None)
            self._thread.join()
            self._thread = self.native_thread = None

    def _run(self) -> None:
        while (flight := self._flights.get()) is not None:
            flight.compute(self._runner)


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

    def compute(self, runner: PlanRunner) -> None:
        """Compute the plan and its drafts, in the forward thread."""
        try:
            part = None if self._plan.part is not None else self._given
            self._outcome = runner.run(self._plan, part)
        except BaseException as error:  # noqa: BLE001  # raised where the outcome is read
            self._outcome = self._drafts = error
        self._landed.release()
        if self._drafts is None and self._plan.draft_counts is not None:
            try:
                self._drafts = runner.make_drafts()
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
