"""Flights: plans that the loop's thread computes, a thread of their own, or another device."""

from __future__ import annotations

import logging
from itertools import count
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

import msgspec
import numpy as np

from antiphon.model_worker.batching.plan import (
    DeviceLost,
    Flight,
    Ints,
    SamplingPart,
    StepOutcome,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from antiphon.model_worker.batching.plan import PlanRunner, StepPlan

log = logging.getLogger(__name__)

T = TypeVar("T")


class Drafting:
    """Makes the drafts after plans. A failure costs these drafts, which are token 0 then."""

    def __init__(self, runner: PlanRunner) -> None:
        self._runner = runner
        self.failures = 0
        self._lost: DeviceLost | None = None

    def make(self, plan: StepPlan) -> Ints:
        """Make the drafts after a plan, which asks for some  ->  (R, K).

        Raises:
            DeviceLost: No plan can be computed any more.
        """
        counts = plan.draft_counts
        assert counts is not None, "the plan asks for no drafts"
        try:
            return self._runner.make_drafts()
        except DeviceLost as lost:
            self._lost = lost
            raise
        except Exception:
            self.failures += 1
            log.exception("drafting failed", extra={"step": plan.step})
            return np.zeros((len(counts), counts.max(initial=0)), np.int32)

    def raise_lost(self) -> None:
        """Raise `DeviceLost` if drafting has: no drafts need be read after each plan."""
        if self._lost is not None:
            raise self._lost


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


class Seat(Protocol):
    """A place beside the kernels of the forward thread, for the thread that waits for them."""

    def offer(self) -> None:
        """Offer it, in the forward thread."""

    def finish(self, step: int) -> None:
        """The steps up to this one are over."""

    def help(self, step: int) -> object:
        """Compute with the forward thread until a step is over."""


class StreamFlight(Flight, Protocol):
    """A plan that was launched on a device."""

    @property
    def error(self) -> Exception | None:
        """What it has raised so far, as `outcome` will."""
        ...


@runtime_checkable
class StreamRunner(Protocol):
    """Launches plans on a device, which computes them in their order."""

    def launch(self, plan: StepPlan) -> StreamFlight: ...


class InStream:
    """Launches plans on a device that computes them while the host goes on."""

    thread: Thread | None = None
    draft_failures = 0

    def __init__(self, runner: StreamRunner) -> None:
        self._runner = runner

    def launch(self, plan: StepPlan) -> Flight:
        """Launch a plan.

        Raises:
            DeviceLost: At once, since devices of other ranks wait for what was not launched.
        """
        flight = self._runner.launch(plan)
        if isinstance(flight.error, DeviceLost):
            raise flight.error
        return flight

    def wait(self) -> None:
        pass

    def close(self) -> None:
        pass


class ForwardThread:
    """Computes plans in a thread of its own, which begins with the first one.

    It calls `begin` before that: what a runner keeps by thread is set there. If it has a seat, a
    thread that waits for an outcome computes meanwhile.
    """

    def __init__(
        self,
        runner: PlanRunner,
        begin: Callable[[], None] | None = None,
        seat: Seat | None = None,
    ) -> None:
        self._runner = runner
        self._begin = begin
        self._seat = seat
        self._steps = count(1)
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
        self._last = ThreadFlight(plan, self._steps, self._seat)
        self._flights.put(self._last)
        return self._last

    def wait(self) -> None:
        if self._last is not None:
            self._last.drafts()

    def close(self) -> None:
        """End the thread after the launched plans, each of which must have its sampling part."""
        if self.thread is not None:
            self._flights.put(None)
            self.thread.join()
            self.thread = None

    def _run(self) -> None:
        if self._begin is not None:
            self._begin()
        if self._seat is not None:
            self._seat.offer()
        while (flight := self._flights.get()) is not None:
            flight.compute(self._runner, self._drafting)


class ThreadFlight:
    """A plan that the forward thread computes. Each queue passes one value to the other thread."""

    def __init__(self, plan: StepPlan, steps: Iterator[int], seat: Seat | None) -> None:
        self._plan = plan
        self._seat = seat
        self._outcome_step, self._drafts_step = next(steps), next(steps)
        self._parts = SimpleQueue[SamplingPart]()
        self._outcomes = SimpleQueue[StepOutcome | BaseException]()
        self._drafted = SimpleQueue[Ints | BaseException]()
        self._drafts: Ints | BaseException | None = None  # once they were waited for

    def compute(self, runner: PlanRunner, drafting: Drafting) -> None:
        """Compute the plan and its drafts, in the forward thread."""
        drafts: Ints | BaseException = _NO_DRAFTS
        try:
            drafting.raise_lost()
            part = None if self._plan.part is not None else self._parts.get
            self._outcomes.put(runner.run(self._plan, part))
        except BaseException as error:  # noqa: BLE001  # raised where the outcome is read
            self._outcomes.put(error)
            self._finish(self._outcome_step)
        else:
            self._finish(self._outcome_step)
            if self._plan.draft_counts is not None:
                try:
                    drafts = drafting.make(self._plan)
                except BaseException as error:  # noqa: BLE001  # raised where drafts are read
                    drafts = error
        self._drafted.put(drafts)
        self._finish(self._drafts_step)

    def sample(self, part: SamplingPart) -> None:
        self._parts.put(part)

    def outcome(self) -> StepOutcome:
        self._help(self._outcome_step)
        return _or_raise(self._outcomes.get())

    def drafts(self) -> Ints:
        if self._drafts is None:
            self._help(self._drafts_step)
            self._drafts = self._drafted.get()
        return _or_raise(self._drafts)

    def _finish(self, step: int) -> None:
        if self._seat is not None:
            self._seat.finish(step)

    def _help(self, step: int) -> None:
        if self._seat is not None:
            self._seat.help(step)


_NO_DRAFTS: Ints = np.zeros((0, 0), np.int32)


def _or_raise(found: T | BaseException) -> T:
    if isinstance(found, BaseException):
        raise found
    return found
