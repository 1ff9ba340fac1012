"""The batching loop in its own thread, and the bus side that writes to its mailbox meanwhile."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, NoReturn

import msgspec
import numpy as np
import pytest
from tests.simulation.batching_world import Reported, World
from tests.simulation.hash_runner import both
from tests.support import worker

from antiphon.model_worker.batching.flights import ForwardThread, InTurn
from antiphon.model_worker.batching.loop import BatchingLoop, StepReport
from antiphon.model_worker.batching.mailbox import ControlCommand, Mailbox
from antiphon.model_worker.batching.plan import DeviceLost
from antiphon.model_worker.batching.state import AnyProgress, ChoiceKey, Progress
from antiphon.wire.base import FinishReason
from antiphon.wire.command import (
    ContinueWorker,
    ControlDone,
    FlushCache,
    PauseMode,
    PauseWorker,
    SetWeightVersion,
)
from antiphon.wire.errors import Overloaded
from antiphon.wire.ids import RequestId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from antiphon.model_worker.batching.plan import SamplingPart, StepOutcome, StepPlan

WAIT_S = 20.0
"""How long a test waits for a report that never comes."""


class BusSide:
    """What runs in the event loop's thread: it writes letters, and reads what the loop reports."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.random = world.random
        self.box = Mailbox(capacity=6)
        self.reports: SimpleQueue[StepReport] = SimpleQueue()
        self.done: list[ControlDone] = []
        self.last: StepReport | None = None
        self.failed: list[BaseException] = []
        self.seen: Counter[str] = Counter()
        self._ordered = 0
        world.poison = 0.0  # drawing from the world's seed belongs to this thread
        world.runner.poisoned = lambda _plan, _row: False
        launcher = ForwardThread(world.runner) if world.ahead else InTurn(world.runner)
        self.loop = BatchingLoop(
            *(world.batching, launcher, self.box, self.reports.put), ahead=world.ahead
        )
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self.loop.run()
        except BaseException as error:
            self.failed.append(error)
            raise

    def receive(self, *, wait: bool) -> bool:
        try:
            report = self.reports.get(timeout=WAIT_S) if wait else self.reports.get_nowait()
        except Empty:
            assert not wait, f"the loop reports nothing: {self.failed}"
            return False
        self.last = report
        self.done += report.done
        # What was on its way when a choice was dropped is not received.
        dropped = {key for key, reported in self.world.reported.items() if reported.dropped}
        kept: list[AnyProgress] = []
        for news in report.progress:
            if isinstance(news, Progress):
                here = np.array([news.key not in dropped])
                kept += [news] if here.all() else []
            else:
                here = ~np.isin(news.keys, list(dropped))
                kept.append(news.take(here))
            self.seen["crossed"] += int(np.count_nonzero(~here))
        returned = tuple(key for key in report.returned if key not in dropped)
        self.world.receive(msgspec.structs.replace(report, progress=kept, returned=returned))
        return True

    def receive_until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self.receive(wait=True)

    def order(self, *orders: ControlCommand) -> None:
        for order in orders:
            self.box.submit_command(order)
        self._ordered += len(orders)
        self.receive_until(lambda: len(self.done) == self._ordered)

    def run(self) -> None:
        """Send a request, whose choices may find the box full."""
        pairs = self.world.new_choices()
        for index, (key, state) in enumerate(pairs):
            try:
                self.box.run(key, state)
            except Overloaded:
                self.seen["refused"] += 1
                for unsent, _ in pairs[index:]:
                    self.world.reported[unsent].dropped = True
                for sent, _ in pairs[:index]:
                    self.drop(sent)
                return

    def drop(self, key: ChoiceKey) -> None:
        reported = self.world.reported[key]
        reported.dropped = True
        self.box.drop(key, self.random.choice([None, len(reported.ids)]))

    def run_endless(self) -> Reported:
        """Send a request that ends by its length alone."""
        key, ends = ChoiceKey(0), {"max_new_tokens": 90, "ignore_eos": True}
        state = worker.state([5, 6, 7], request_id=RequestId("r0"), **ends)
        self.world.reported[key] = reported = Reported(state)
        self.box.run(key, state)
        return reported

    def act(self) -> None:
        """Do one thing, whatever the loop does at this moment."""
        live = [key for key, reported in self.world.reported.items() if reported.live]
        match self.random.choice(["run"] * 8 + ["drop", "return", "receive", "order", "fail"]):
            case "drop" if live:
                self.drop(self.random.choice(live))
            case "return" if live:
                states = {key: self.world.reported[key].state for key in live}
                asked = states[self.random.choice(live)].request_id
                self.box.requeue(tuple(key for key in live if states[key].request_id == asked))
            case "receive":
                while self.receive(wait=False):
                    pass
            case "order":
                mode = self.random.choice(list(PauseMode))
                weights = SetWeightVersion(version=str(self._ordered), abort_all=False)
                more = [weights] if self.random.random() < 0.3 else []
                self.order(FlushCache(), PauseWorker(mode=mode), ContinueWorker(), *more)
            case "fail":
                self.world.runner.fail = not self.world.runner.fail
            case _:
                self.run()

    def drain(self) -> None:
        self.world.runner.fail = False
        self.order(ContinueWorker())
        self.receive_until(
            lambda: not any(reported.live for reported in self.world.reported.values())
        )
        # Dropped choices may still be running, or their rows be in flight: nothing reports them.
        self.order(FlushCache())
        self.receive_until(lambda: self.last is not None and self.last.totals.running == 0)

    def verify(self, reported: Reported) -> None:
        if reported.finish is not None and reported.finish.reason is FinishReason.ABORT:
            said, _ = self.world.alone(reported.state)
            assert reported.ids == said[: len(reported.ids)]
        else:
            self.world.verify(reported)


@contextmanager
def beside(world: World) -> Iterator[BusSide]:
    """The loop runs in a thread; it has ended, without a bug, when the block is left."""
    side = BusSide(world)
    side.thread.start()
    try:
        yield side
    finally:
        side.box.close()
        side.thread.join(WAIT_S)
    assert not side.thread.is_alive(), "the loop does not end"
    assert not side.failed


def test_the_threads_cross_in_every_way() -> None:
    missing = {"refused", "crossed", "returned", "abort", "length", "stop", "internal"}
    for seed in range(40):  # a few are enough, unless one thread is much slower than the other
        with beside(World(seed, overlap=True, queue_timeout_s=None)) as side:
            for _ in range(250):
                side.act()
            side.drain()
        missing -= {*side.seen, *side.world.seen}
        if not missing:
            return
    assert not missing


def test_a_report_is_delivered_before_the_next_step_is_computed() -> None:
    world = World(1, overlap=False, queue_timeout_s=None, running_timeout_s=None)
    received, delivered = 0, {}
    compute = world.runner.run

    def run(plan: StepPlan, part: Callable[[], SamplingPart] | None = None) -> StepOutcome:
        delivered[plan.step] = received
        return compute(plan, part)

    def deliver(report: StepReport) -> None:
        nonlocal received
        received += 1
        side.reports.put(report)

    world.runner.run = run  # type: ignore[method-assign]
    with beside(world) as side:
        side.loop._deliver = deliver
        reported = side.run_endless()
        side.receive_until(lambda: reported.finish is not None)
    assert len(delivered) > 10
    assert all(count == step - 1 for step, count in delivered.items())


@both
def test_who_waits_in_a_pause_for_too_long_ends_in_it(overlap: bool) -> None:
    world = World(1, overlap=overlap, queue_timeout_s=0.05, running_timeout_s=None)
    with beside(world) as side:
        side.order(PauseWorker(mode=PauseMode.IN_PLACE))
        reported = side.run_endless()
        side.receive_until(lambda: reported.finish is not None)
        assert side.last is not None
        assert side.last.paused
    assert world.seen == Counter(overloaded=1)
    assert world.batching.idle


def test_the_thread_of_forward_passes_ends_with_the_loop() -> None:
    before = set(threading.enumerate())
    world = World(1, overlap=True, queue_timeout_s=None, running_timeout_s=None)
    with beside(world) as side:
        side.run_endless()
        side.receive(wait=True)
        assert len(side.loop.native_threads) == 2
    assert len(side.loop.native_threads) == 1
    assert set(threading.enumerate()) <= before


@both
def test_a_device_lost_while_drafting_ends_the_process_with_the_next_plan(overlap: bool) -> None:
    """No request waits for the drafts themselves, and none ends: another worker goes on with it."""
    world, box = World(1, overlap=overlap, draft_model=True), Mailbox(1)
    reports: list[StepReport] = []
    launcher = ForwardThread(world.runner) if overlap else InTurn(world.runner)
    loop = BatchingLoop(world.batching, launcher, box, reports.append, ahead=int(overlap))

    def lose() -> NoReturn:
        raise DeviceLost("the driver has gone")

    world.runner.make_drafts = lose  # type: ignore[method-assign]
    box.run(ChoiceKey(0), worker.state([5, 6, 7], max_new_tokens=90, ignore_eos=True))
    with pytest.raises(DeviceLost):
        loop.run()
    launcher.close()
    assert world.runner.plans == 1
    progress = [news for report in reports for news in report.progress]
    assert all(isinstance(news, Progress) and news.finish is None for news in progress)
    assert launcher.draft_failures == 0


@both
@pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT])
def test_who_runs_for_too_long_ends_though_the_loop_is_paused(
    overlap: bool, mode: PauseMode
) -> None:
    world = World(1, overlap=overlap, queue_timeout_s=None, running_timeout_s=0.05)
    begun, goes_on = threading.Event(), threading.Event()
    compute = world.runner.run

    def run(plan: StepPlan, part: Callable[[], SamplingPart] | None = None) -> StepOutcome:
        begun.set()
        assert goes_on.wait(WAIT_S)
        return compute(plan, part)

    world.runner.run = run  # type: ignore[method-assign]
    with beside(world) as side:
        reported = side.run_endless()
        assert begun.wait(WAIT_S)
        side.box.submit_command(PauseWorker(mode=mode))
        goes_on.set()
        side.receive_until(lambda: reported.finish is not None)
    assert world.seen["deadline"] == 1
    assert side.last is not None
    assert side.last.paused
    assert world.pools.used() == world.pools.loose()
