"""Tokens are sent in the batching loop's thread, while the event loop's thread sends, too."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest
from tests.support.memory_bus import MemoryBroker, MemoryTransport
from tests.support.wait import until
from tests.support.worker import (
    DEADLINE,
    DETOKENIZER,
    LEADER,
    WORKER,
    ColumnReader,
    FakeEngine,
    admit,
    attempt,
    report,
)

from antiphon.bus.bus import Bus
from antiphon.bus.transport import BusDown
from antiphon.model_worker.batching.state import ChoiceKey, Finish
from antiphon.model_worker.protocol.outbox import PlainStreams, TokenOutbox
from antiphon.model_worker.protocol.token_sender import REPORTS_MAX, ReportQueue, TokenSender
from antiphon.model_worker.protocol.worker_output import DropChoice, WorkerOutput
from antiphon.service.sequence import SeqSender
from antiphon.wire.base import FinishReason
from antiphon.wire.codec import decode, unpack_ids
from antiphon.wire.command import CommandBatch, ResendTokens, StopChoice
from antiphon.wire.ids import ClusterName, RequestId
from antiphon.wire.tokens import TokenBatch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from antiphon.model_worker.batching.loop import StepReport

KEYS = (1, 2, 3)


class Wire(MemoryTransport):
    """Keeps what is published, from whatever thread; or is down when it comes to that."""

    def __init__(self, *, any_thread: bool = True) -> None:
        super().__init__(MemoryBroker())
        self.link.up = True
        self.sent: list[TokenBatch] = []
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
        self.sent.append(decode(data, (TokenBatch,)))


class Stage:
    """A worker of three requests that each have one token, which was sent."""

    def __init__(self, *, any_thread: bool = True, wait_s: float = 60.0) -> None:
        self.wire = Wire(any_thread=any_thread)
        self.output = WorkerOutput(WORKER, SeqSender(), live_max=8)
        bus = Bus(self.wire, ClusterName("c"), WORKER)
        self.sender = TokenSender(bus, self.output, wait_s=wait_s)
        self.engine = FakeEngine()
        commands = tuple(admit(f"r{key}") for key in KEYS)
        batch = CommandBatch(
            leader=LEADER, worker=WORKER, seq=1, commands=commands, not_after_unix_ms=DEADLINE
        )
        self.output.command(batch, 0)
        self.output.step(1, [self.engine.progress(key, [0]) for key in KEYS])
        self.sender.publish()

    def sample(self, token: int) -> bool:
        """A step that adds this token to each request."""
        tokens = self.engine.sampled(dict.fromkeys(KEYS, token))
        return self.sender.take_in(report(token, progress=[tokens], running=3))

    def resend(self) -> None:
        self.output.resend(ResendTokens(worker=WORKER, detokenizer=DETOKENIZER, places=()))

    def received(self) -> dict[str, list[int]]:
        """The ids that a detokenizer reads from the messages."""
        numbers = [batch.seq for batch in self.wire.sent]
        assert numbers == [*range(1, len(numbers) + 1)], "sent in another order than numbered"
        reader = ColumnReader()
        ids: dict[str, list[int]] = {f"r{key}": [] for key in KEYS}
        for row in (row for batch in self.wire.sent for row in reader.rows(batch)):
            assert row.offset <= len(ids[row.request_id]), "a token was left out"
            ids[row.request_id][row.offset :] = unpack_ids(row.token_ids)
        return ids


def each(tokens: Sequence[int]) -> dict[str, list[int]]:
    return {f"r{key}": list(tokens) for key in KEYS}


def test_tokens_are_sent_in_the_thread_that_reports_them() -> None:
    stage = Stage()
    thread = threading.Thread(target=lambda: [stage.sample(step) for step in range(2, 9)])
    thread.start()
    thread.join()
    assert stage.received() == each([0, *range(2, 9)])
    assert all(batch.columns is not None for batch in stage.wire.sent[1:])
    assert stage.sender.sending_s > 0
    assert not stage.output.has_unsent


def test_the_event_loop_is_to_publish_where_only_that_may() -> None:
    stage = Stage(any_thread=False)
    assert stage.sample(2)
    assert stage.sample(3)
    assert stage.received() == each([0])
    stage.sender.publish()
    assert stage.received() == each([0, 2, 3])
    assert not stage.output.has_unsent


def test_tokens_of_an_outage_wait_for_the_next_step_after_it() -> None:
    stage = Stage()
    stage.wire.link.up = False
    assert not stage.sample(2)
    stage.sender.publish()
    assert stage.received() == each([0])
    stage.wire.link.up = True
    assert not stage.sample(3)
    assert stage.received() == each([0, 2, 3])


def test_tokens_lost_as_the_link_drops_are_sent_when_they_are_requested(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage = Stage()
    stage.wire.down = True
    stage.sample(2)
    assert "tokens not sent" in caplog.text
    stage.wire.down = False
    stage.sample(3)
    assert [batch.seq for batch in stage.wire.sent] == [1, 3]
    del stage.wire.sent[:]
    with stage.sender.lock:
        stage.resend()
        stage.sender.publish()
    (batch,) = stage.wire.sent
    assert [list(unpack_ids(row.token_ids)) for row in batch.rows] == [[0, 2, 3]] * len(KEYS)


def test_an_end_is_for_the_event_loop_and_a_token_is_not() -> None:
    stage = Stage()
    assert not stage.sample(2)
    finish = Finish(reason=FinishReason.LENGTH)
    assert stage.sender.take_in(report(3, progress=(stage.engine.progress(1, [3], finish),)))
    assert stage.received()["r1"] == [0, 2, 3]
    assert stage.output.live_count == 2


@pytest.mark.parametrize(
    ("owner", "name"), [(PlainStreams, "take"), (TokenOutbox, "put_columns"), (TokenOutbox, "take")]
)
def test_requests_of_a_step_that_cannot_be_taken_in_end(
    owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("a bug, on purpose")

    stage = Stage()
    with monkeypatch.context() as broken:
        broken.setattr(owner, name, fail)
        assert stage.sample(2)
    assert stage.output.live_count == 0
    assert stage.output.take_actions() == [DropChoice(ChoiceKey(key)) for key in KEYS]
    stage.sender.publish()
    reader = ColumnReader()
    ends = [row for batch in stage.wire.sent for row in reader.rows(batch) if row.finish_reason]
    assert [row.error and row.error.code for row in ends] == ["internal"] * len(KEYS)


def test_resends_and_a_stop_between_steps_neither_lose_nor_disorder_a_token() -> None:
    stage, step = Stage(), 1
    enough, sampled = threading.Event(), threading.Event()

    def sample() -> None:
        nonlocal step
        while not enough.is_set():
            step += 1
            stage.sample(step)
            sampled.set()

    thread = threading.Thread(target=sample)
    thread.start()
    for resends in range(100):
        sampled.clear()
        assert sampled.wait(10)
        with stage.sender.lock:
            stage.resend()
            if resends % 2:
                stage.sender.publish()  # or the next step takes it along
            if resends == 3:
                stop = StopChoice(
                    request_id=RequestId("r2"),
                    attempt=attempt(),
                    detokenizer=DETOKENIZER,
                )
                stage.output.stop(stop)
    enough.set()
    thread.join()
    stage.sender.publish()
    received = stage.received()
    assert received["r1"] == received["r3"] == [0, *range(2, step + 1)]
    assert received["r2"] == received["r1"][: len(received["r2"])]
    assert len(received["r2"]) < len(received["r1"])


def test_batching_loop_ends_when_the_event_loop_keeps_the_outputs() -> None:
    stage = Stage(wait_s=0.05)
    raised: list[str] = []

    def run() -> None:
        try:
            stage.sample(2)
        except TimeoutError as error:
            raised.append(str(error))

    with stage.sender.lock:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join(20)
    assert raised == ["the event loop has held the outputs for 0.05 s"]


class Queue:
    """Both ends of a queue of reports; `taken` are the steps that the event loop has processed."""

    def __init__(self, wait_s: float = 60.0) -> None:
        self.taken: list[int] = []
        self.reports = ReportQueue(take=self.take, wait_s=wait_s)

    def take(self, report: StepReport) -> None:
        assert report.step != 13, "the thirteenth cannot be processed"
        self.taken.append(report.step)

    def put(self, *reports: StepReport) -> threading.Thread:
        """In a thread as the batching loop's."""

        def run() -> None:
            for one in reports:
                self.reports.put(one)

        thread = threading.Thread(target=run)
        thread.start()
        return thread


async def test_reports_are_taken_in_their_order() -> None:
    queue = Queue()
    queue.put(report(1), report(2), report(3)).join()
    assert queue.taken == []
    await until(lambda: queue.taken == [1, 2, 3])


async def test_the_batching_loop_waits_where_the_event_loop_is_far_behind() -> None:
    queue = Queue()
    steps = range(100, 100 + 3 * REPORTS_MAX)
    thread = queue.put(*map(report, steps))
    thread.join(0.05)  # no report is taken meanwhile
    assert thread.is_alive()
    await until(lambda: not thread.is_alive())
    await until(lambda: queue.taken == [*steps])


async def test_error_of_a_report_is_raised_where_it_is_awaited() -> None:
    queue = Queue()
    queue.put(report(12), report(13), report(14)).join()
    with pytest.raises(AssertionError, match="thirteenth"):
        async with asyncio.timeout(10):
            await queue.reports.failed
    await until(lambda: queue.taken == [12, 14])


async def test_batching_loop_ends_when_the_event_loop_hangs() -> None:
    queue = Queue(wait_s=0.05)
    raised: list[BaseException] = []

    def run() -> None:
        try:
            for step in range(1, REPORTS_MAX + 2):
                queue.reports.put(report(100 + step))
        except TimeoutError as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)  # in the event loop's thread: so it takes none
    assert [str(error) for error in raised] == [
        "the event loop processed none of 64 step reports in 0.05 s"
    ]
    await until(lambda: queue.taken == [100 + step for step in range(1, REPORTS_MAX + 1)])
