"""When a loop that stands still is worth a word, and when the process has to end."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from tests.simulation.batching_world import World
from tests.support.worker import plain_runs, state

from antiphon.config.worker import BatchingConfig
from antiphon.model_worker.batching.flights import ForwardThread
from antiphon.model_worker.batching.mailbox import Mail
from antiphon.model_worker.batching.state import ChoiceKey
from antiphon.model_worker.observability.watchdog import (
    LoopWatchdog,
    StallDetector,
    StallVerdict,
    stack_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from antiphon.model_worker.batching.plan import SamplingPart, StepOutcome, StepPlan


def test_loop_with_progress_is_not_reported() -> None:
    dog = StallDetector(stall_s=2.0, limit_s=5.0)
    assert not any(dog.observe(pulse, pulse * 1.0) for pulse in range(1, 100))


def test_idle_loop_is_never_reported() -> None:
    dog = StallDetector(stall_s=2.0, limit_s=5.0)
    assert not any(dog.observe(0, now) for now in range(100))
    assert dog.observe(8, 101.0) is None


def test_stall_is_reported_once_and_a_hang_always() -> None:
    dog = StallDetector(stall_s=2.0, limit_s=5.0)
    said = [dog.observe(7, now) for now in range(8)]
    assert said == [None, None, StallVerdict.STALLED, None, None, *[StallVerdict.HUNG] * 3]


def test_recovered_loop_is_reported_again() -> None:
    dog = StallDetector(stall_s=2.0, limit_s=9.0)
    assert [dog.observe(1, now) for now in (0, 2, 3)] == [None, StallVerdict.STALLED, None]
    assert [dog.observe(2, now) for now in (4, 5, 6)] == [None, None, StallVerdict.STALLED]
    assert dog.stalled_s(6.5) == 2.5


def test_limit_below_the_stall_time_is_a_hang_at_once() -> None:
    dog = StallDetector(stall_s=30.0, limit_s=5.0)
    assert [dog.observe(1, now) for now in (0, 6)] == [None, StallVerdict.HUNG]


def test_stack_of_a_thread_names_its_function() -> None:
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


def test_stall_names_the_forward_pass_that_hangs_and_its_plan(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Not the plan that was launched after it."""
    world = World(1, overlap=True, running_max=3, queue_timeout_s=None, running_timeout_s=None)
    held, there, compute = threading.Event(), threading.Event(), world.runner.run

    def hang_about(plan: StepPlan, part: Callable[[], SamplingPart] | None = None) -> StepOutcome:
        there.set()
        assert held.wait(10)
        return compute(plan, part)

    world.runner.run = hang_about  # type: ignore[method-assign]
    forward = ForwardThread(world.runner)
    world.loop.use(forward, ahead=1)
    runs = {ChoiceKey(0): state([5, 6, 7], max_new_tokens=9, ignore_eos=True)}
    loop = threading.Thread(
        target=lambda: [world.loop.turn(Mail(runs=plain_runs(runs))), world.loop.turn(Mail())]
    )
    loop.start()
    assert there.wait(10)
    while world.loop.reading is None:
        pass
    stalls: list[None] = []
    config = BatchingConfig(stall_s=1.0, stall_limit_s=100.0)
    watchdog = LoopWatchdog(world.loop, config, lambda: stalls.append(None))
    watchdog.check(0.0)
    watchdog.check(2.0)
    held.set()
    loop.join()
    forward.close()
    (record,) = caplog.records
    assert "hang_about" in vars(record)["forward_stack"]
    assert vars(record)["step"] == 1
    assert len(stalls) == 1
