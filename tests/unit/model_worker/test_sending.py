"""Tokens that are sent where they are drawn, while the event loop's thread speaks, too."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.support.memory_bus import MemoryBroker, MemoryTransport
from tests.support.wait import until
from tests.support.worker import DEADLINE, DETOKENIZER, LEADER, WORKER, admit, attempt, report

from antiphon.bus.bus import Bus
from antiphon.bus.transport import BusDown
from antiphon.detokenizer.unfolding import Unfolding
from antiphon.model_worker.batching.state import ChoiceKey, Progress
from antiphon.model_worker.batching.steady import Drawn
from antiphon.model_worker.protocol.reports import REPORTS_MAX, ReportQueue
from antiphon.model_worker.protocol.token_sender import TokenSender
from antiphon.model_worker.protocol.worker_output import WorkerOutput
from antiphon.service.sequence import SeqSender
from antiphon.wire.codec import decode, pack_ids, unpack_ids
from antiphon.wire.command import CommandBatch, ResendTokens, StopChoice
from antiphon.wire.ids import ClusterName, RequestId
from antiphon.wire.tokens import TokenBatch, TokenNews, TokenStep

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from antiphon.model_worker.batching.loop import StepReport

KEYS = tuple(ChoiceKey(number) for number in (1, 2, 3))


class Wire(MemoryTransport):
    """Keeps what is published, from whatever thread; or is down when it comes to that."""

    def __init__(self, *, any_thread: bool = True) -> None:
        super().__init__(MemoryBroker())
        self.link.up = True
        self.sent: list[TokenNews] = []
        self.down = False
        self._any_thread = any_thread

    @property
    def any_thread(self) -> bool:
        return self._any_thread

    def publish(
        self,
        subject: str,
        data: bytes,
        reply: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if self.down:
            raise BusDown("the NATS connection is down", retry_after_s=1.0)
        self.sent.append(decode(data, (TokenBatch, TokenStep)))


class Stage:
    """A worker of three requests that have each said a token."""

    def __init__(self, *, any_thread: bool = True) -> None:
        self.wire = Wire(any_thread=any_thread)
        self.output = WorkerOutput(WORKER, SeqSender(), live_max=8)
        self.sending = TokenSender(Bus(self.wire, ClusterName("c"), WORKER), self.output)
        commands = tuple(admit(f"r{key}") for key in KEYS)
        batch = CommandBatch(
            leader=LEADER, worker=WORKER, seq=1, commands=commands, not_after_unix_ms=DEADLINE
        )
        self.output.command(batch, 0)
        self.before = [Progress(key=key, token_ids=pack_ids([0])) for key in KEYS]
        self.output.step(1, self.before)
        self.sending.publish()

    def relay(self, step: int) -> bool:
        drawn = Drawn(KEYS, self.before, np.full(len(KEYS), step, np.int32))
        steady = report(step, progress=drawn, running=3)
        assert steady.steady
        with self.sending.lock:
            return self.sending.relay(steady)

    def heard(self) -> dict[str, list[int]]:
        """What a detokenizer makes of the messages."""
        said: dict[str, list[int]] = {f"r{key}": [] for key in KEYS}
        assert [news.seq for news in self.wire.sent] == [
            number + 1 for number in range(len(self.wire.sent))
        ], "numbers left in another order than the messages"
        unfolding = Unfolding()
        for news in self.wire.sent:
            batch = unfolding.batch(news)
            assert batch is not None, "a step follows nothing"
            for row in batch.rows:
                ids = said[row.request_id]
                assert row.offset <= len(ids), "a token was left out"
                ids[row.offset :] = unpack_ids(row.token_ids)
        return said


def everybody(tokens: Sequence[int]) -> dict[str, list[int]]:
    return {f"r{key}": list(tokens) for key in KEYS}


def test_tokens_are_sent_in_the_thread_that_drew_them() -> None:
    stage = Stage()
    thread = threading.Thread(target=lambda: [stage.relay(step) for step in range(2, 9)])
    thread.start()
    thread.join()
    assert stage.heard() == everybody([0, *range(2, 9)])
    assert stage.sending.relayed_s > 0
    assert not stage.output.has_unsent


def test_nothing_is_done_where_only_the_event_loop_may_send() -> None:
    stage = Stage(any_thread=False)
    assert not stage.relay(2)
    stage.wire.link.up = False
    assert not stage.relay(2)
    assert not stage.output.has_unsent
    assert stage.heard() == everybody([0])


def test_what_a_link_loses_that_drops_just_then_is_sent_when_it_is_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage = Stage()
    stage.wire.down = True
    assert stage.relay(2)
    assert "tokens not sent" in caplog.text
    stage.wire.down = False
    assert stage.relay(3)
    assert [news.seq for news in stage.wire.sent] == [1, 3]
    del stage.wire.sent[:]
    with stage.sending.lock:
        stage.output.resend(ResendTokens(worker=WORKER, detokenizer=DETOKENIZER, places=()))
        stage.sending.publish()
    (batch,) = stage.wire.sent
    assert isinstance(batch, TokenBatch)
    assert [list(unpack_ids(row.token_ids)) for row in batch.rows] == [[0, 2, 3]] * len(KEYS)


def test_resends_and_a_stop_in_the_middle_neither_lose_nor_disorder_a_token() -> None:
    stage, step = Stage(), 1
    enough, drew = threading.Event(), threading.Event()

    def draw() -> None:
        nonlocal step
        while not enough.is_set():
            step += 1
            assert stage.relay(step)
            drew.set()

    thread = threading.Thread(target=draw)
    thread.start()
    for resends in range(100):
        drew.clear()
        assert drew.wait(10)
        with stage.sending.lock:
            stage.output.resend(ResendTokens(worker=WORKER, detokenizer=DETOKENIZER, places=()))
            if resends % 2:
                stage.sending.publish()  # or what is drawn next takes it along
            if resends == 3:
                stop = StopChoice(
                    request_id=RequestId("r2"),
                    attempt=attempt(),
                    detokenizer=DETOKENIZER,
                )
                stage.output.stop(stop)
    enough.set()
    thread.join()
    stage.sending.publish()
    said = stage.heard()
    assert said["r1"] == said["r3"] == [0, *range(2, step + 1)]
    assert said["r2"] == said["r1"][: len(said["r2"])]
    assert len(said["r2"]) < len(said["r1"])


STEADY = Drawn((ChoiceKey(1),), [Progress(key=ChoiceKey(1))], np.zeros(1, np.int32))


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
