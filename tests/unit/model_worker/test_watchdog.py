"""When a loop that stands still is worth a word, and when the process has to end."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.simulation.batching_world import World
from tests.support.worker import plain_runs, state

from antiphon.config.worker import BatchingConfig
from antiphon.model_worker.batching.flights import ForwardThread
from antiphon.model_worker.batching.mailbox import Mail
from antiphon.model_worker.batching.state import ChoiceKey
from antiphon.model_worker.observability.watchdog import LoopHung, LoopWatchdog, stack_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from antiphon.model_worker.batching.plan import SamplingPart, StepOutcome, StepPlan


class Watched:
    """A loop whose progress the test sets, under a watchdog."""

    def __init__(self, stall_s: float, limit_s: float) -> None:
        self._loop: Any = SimpleNamespace(reading=None, thread=None, forward_thread=None)
        self._stalls = 0
        config = BatchingConfig(stall_s=stall_s, stall_limit_s=limit_s)
        self._dog = LoopWatchdog(self._loop, config, self._count)

    def _count(self) -> None:
        self._stalls += 1

    def check(self, progress_count: int, now: float) -> str | None:
        """What the watchdog finds: a stall, a hang, or nothing."""
        self._loop.progress_count, before = progress_count, self._stalls
        try:
            self._dog.check(now)
        except LoopHung:
            return "hung"
        return "stalled" if self._stalls > before else None


def test_loop_with_progress_is_not_reported() -> None:
    dog = Watched(stall_s=2.0, limit_s=5.0)
    assert not any(dog.check(count, count * 1.0) for count in range(1, 100))


def test_idle_loop_is_never_reported() -> None:
    dog = Watched(stall_s=2.0, limit_s=5.0)
    assert not any(dog.check(0, now) for now in range(100))
    assert dog.check(8, 101.0) is None


def test_stall_is_reported_once_and_a_hang_always() -> None:
    dog = Watched(stall_s=2.0, limit_s=5.0)
    found = [dog.check(7, now) for now in range(8)]
    assert found == [None, None, "stalled", None, None, *["hung"] * 3]


def test_recovered_loop_is_reported_again(caplog: pytest.LogCaptureFixture) -> None:
    dog = Watched(stall_s=2.0, limit_s=9.0)
    assert [dog.check(1, now) for now in (0, 2, 3)] == [None, "stalled", None]
    assert [dog.check(2, now) for now in (4, 5, 6.5)] == [None, None, "stalled"]
    assert [vars(record)["seconds"] for record in caplog.records] == [2.0, 2.5]


def test_limit_below_the_stall_time_is_a_hang_at_once() -> None:
    dog = Watched(stall_s=30.0, limit_s=5.0)
    assert [dog.check(1, now) for now in (0, 6)] == [None, "hung"]


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
