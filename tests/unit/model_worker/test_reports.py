"""Reports between the batching loop's thread and an event loop, each with a real one."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.support.wait import until
from tests.support.worker import report

from antiphon.model_worker.batching.state import ChoiceKey, Progress
from antiphon.model_worker.batching.steady import Drawn
from antiphon.model_worker.protocol.reports import REPORTS_MAX, ReportQueue

if TYPE_CHECKING:
    from collections.abc import Iterator

    from antiphon.model_worker.batching.loop import StepReport

KEYS = (ChoiceKey(1),)
STEADY = Drawn(KEYS, [Progress(key=KEYS[0])], np.zeros(1, np.int32))


class Taker:
    """Both ends: turns as the event loop takes them, and what was relayed."""

    def __init__(self, wait_s: float = 60.0) -> None:
        self.turns: list[list[tuple[int, bool]]] = []
        self.relayed: list[int] = []
        self.relays = False
        self.meanwhile: StepReport | None = None
        self.reports = ReportQueue(relay=self.relay, take=self.take, wait_s=wait_s)

    @property
    def steps(self) -> list[int]:
        return [step for turn in self.turns for step, _ in turn]

    def relay(self, report: StepReport) -> bool:
        if self.relays:
            self.relayed.append(report.step)
        return self.relays

    def take(self, reports: Iterator[tuple[StepReport, bool]]) -> None:
        turn: list[tuple[int, bool]] = []
        self.turns.append(turn)
        for each, last in reports:
            assert each.step != 13, "nobody takes in the thirteenth"
            turn.append((each.step, last))
            if self.meanwhile is not None:
                meanwhile, self.meanwhile = self.meanwhile, None
                self.deliver(meanwhile).join()

    def deliver(self, *reports: StepReport) -> threading.Thread:
        """In a thread as the batching loop's."""

        def run() -> None:
            for each in reports:
                self.reports.deliver(each)

        thread = threading.Thread(target=run)
        thread.start()
        return thread


async def test_what_is_there_is_taken_in_one_turn_and_the_last_is_known() -> None:
    taker = Taker()
    taker.deliver(report(1), report(2), report(3)).join()
    await until(lambda: taker.steps == [1, 2, 3])
    assert [turn for turn in taker.turns if turn] == [[(1, False), (2, False), (3, True)]]


async def test_what_comes_while_others_are_taken_in_has_a_turn_of_its_own() -> None:
    taker = Taker()
    taker.meanwhile = report(2)
    taker.deliver(report(1)).join()
    await until(lambda: taker.steps == [1, 2])
    assert taker.turns == [[(1, True)], [(2, True)]]


async def test_the_batching_loop_waits_where_the_event_loop_is_far_behind() -> None:
    taker = Taker()
    count = 3 * REPORTS_MAX
    thread = taker.deliver(*map(report, range(100, 100 + count)))
    while len(taker.reports) < REPORTS_MAX:
        thread.join(0.001)  # nothing is taken in meanwhile
    assert thread.is_alive()
    await until(lambda: not thread.is_alive())
    await until(lambda: taker.steps == list(range(100, 100 + count)))


@pytest.mark.parametrize("relays", [True, False])
async def test_a_steady_report_passes_nobody_if_it_can_be_relayed(relays: bool) -> None:
    taker = Taker()
    taker.relays = relays
    taker.deliver(report(1), report(2, progress=STEADY), report(3)).join()
    await until(lambda: taker.steps == ([1, 3] if relays else [1, 2, 3]))
    assert taker.relayed == ([2] if relays else [])


async def test_what_cannot_be_taken_in_is_told_to_whoever_waits_for_it() -> None:
    taker = Taker()
    taker.deliver(report(12), report(13), report(14)).join()
    with pytest.raises(AssertionError, match="thirteenth"):
        async with asyncio.timeout(10):
            await taker.reports.failed
    assert taker.steps == [12, 14]


async def test_batching_loop_ends_when_the_event_loop_hangs() -> None:
    taker = Taker(wait_s=0.05)
    raised: list[BaseException] = []

    def run() -> None:
        try:
            for step in range(1, REPORTS_MAX + 2):
                taker.reports.deliver(report(100 + step))
        except TimeoutError as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)  # in the event loop's thread: so it takes in nothing
    assert [str(error) for error in raised] == [
        "the event loop processed none of 64 step reports in 0.05 s"
    ]
    assert len(taker.reports) == REPORTS_MAX
    await until(lambda: len(taker.reports) == 0)
    assert taker.steps == [100 + step for step in range(1, REPORTS_MAX + 1)]
