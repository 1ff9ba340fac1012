"""Flights: plans that are computed in the loop's thread, or in a thread of their own."""

from __future__ import annotations

from queue import SimpleQueue
from threading import Lock, Thread
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from antiphon.model_worker.batching.plan import (
        PlanRunner,
        SamplingPart,
        StepOutcome,
        StepPlan,
    )


class InTurn:
    """Computes a plan when its outcome is read."""

    native_thread: int | None = None

    def __init__(self, runner: PlanRunner) -> None:
        self._runner = runner

    def launch(self, plan: StepPlan) -> InTurnFlight:
        return InTurnFlight(self._runner, plan)


class InTurnFlight:
    def __init__(self, runner: PlanRunner, plan: StepPlan) -> None:
        self._runner = runner
        self._plan = plan

    def sample(self, part: SamplingPart) -> None:
        self._plan = msgspec.structs.replace(self._plan, part=part)

    def outcome(self) -> StepOutcome:
        return self._runner.run(self._plan)


class ForwardThread:
    """Computes plans in a thread of its own, which begins with the first one."""

    def __init__(self, runner: PlanRunner) -> None:
        self._runner = runner
        self._flights = SimpleQueue[ThreadFlight | None]()
        self._thread: Thread | None = None
        self.native_thread: int | None = None

    def launch(self, plan: StepPlan) -> ThreadFlight:
        if self._thread is None:
            self._thread = Thread(target=self._run, name="forward", daemon=True)
            self._thread.start()
            self.native_thread = self._thread.native_id
        flight = ThreadFlight(plan)
        self._flights.put(flight)
        return flight

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
        # Locks as events that happen once: a `threading.Event` takes ten times as long.
        self._sampling, self._landed = Lock(), Lock()
        self._sampling.acquire()
        self._landed.acquire()

    def compute(self, runner: PlanRunner) -> None:
        """Compute the plan, in the forward thread."""
        try:
            part = None if self._plan.part is not None else self._given
            self._outcome = runner.run(self._plan, part)
        except BaseException as error:  # noqa: BLE001  # raised where the outcome is read
            self._outcome = error
        self._landed.release()

    def sample(self, part: SamplingPart) -> None:
        self._part = part
        self._sampling.release()

    def outcome(self) -> StepOutcome:
        self._landed.acquire()
        outcome = self._outcome
        assert outcome is not None, "a flight that landed has an outcome"
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def _given(self) -> SamplingPart:
        self._sampling.acquire()
        assert self._part is not None, "a sampling part was given"
        return self._part
