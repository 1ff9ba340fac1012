"""Steps are accounted later than they run, and nothing of them is lost."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from tests.support import worker
from tests.system.stack import wait_until
from tests.unit.config.test_draft import decide

from antiphon.kernels.cpu import extension
from antiphon.model_worker.batching.page_budget import PoolUse
from antiphon.model_worker.batching.state import ChoiceKey, Finish
from antiphon.model_worker.observability.metrics import CpuTime, WorkerSize
from antiphon.model_worker.observability.step_accounting import (
    REPORTS_MAX,
    LoadStats,
    SlidingSum,
    StepAccounting,
    StepLog,
)
from antiphon.model_worker.protocol.worker_output import RunChoice, WorkerOutput
from antiphon.service.sequence import SeqSender
from antiphon.telemetry.metrics import Metrics
from antiphon.wire.base import FinishReason
from antiphon.wire.command import CommandBatch, StopChoice
from antiphon.wire.ids import RequestId

if TYPE_CHECKING:
    from antiphon.model_worker.batching.loop import StepReport
    from antiphon.wire.heartbeat import WorkerStats

KEY = ChoiceKey(1)
LENGTH = Finish(reason=FinishReason.LENGTH)


SIZES = {"seconds": 0.01, "tokens": 1, "rows": 1, "pages_free": 1, "pages_evictable": 1}


class Desk:
    """Accounts with one choice that runs since 10 s, and their readers."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.accounts = StepAccounting(
            self.metrics, WorkerSize(pages_total=10, page_tokens=16), None
        )
        self.output = WorkerOutput(worker.WORKER, SeqSender(), live_max=8)
        self.engine = worker.FakeEngine()
        batch = CommandBatch(
            leader=worker.LEADER,
            worker=worker.WORKER,
            seq=1,
            commands=(worker.admit(),),
            not_after_unix_ms=worker.DEADLINE,
        )
        (run,) = self.output.command(batch, 0)
        assert isinstance(run, RunChoice)
        self.accounts.begin(run, 10.0)

    def add(self, step: int, ids: list[int], finish: Finish | None = None) -> None:
        progress = (self.engine.progress(KEY, ids, finish),)
        self._take_in(worker.report(step, progress=progress, **SIZES))

    def sample(self, step: int, token: int) -> None:
        """A step of which only a token is reported."""
        sampled = self.engine.sampled({KEY: token})
        self._take_in(worker.report(step, progress=[sampled], **SIZES))

    def _take_in(self, report: StepReport) -> None:
        self.output.step(report.step, report.progress)
        self.output.take()
        self.accounts.record(report, 10.0 + report.step)

    def record(self, **fields: object) -> None:
        """Record a step whose report has these fields, of itself, its capacity or its totals."""
        report = worker.report(1, **SIZES)
        for part in ("capacity", "totals"):
            values = getattr(report, part)
            own = {name: fields.pop(name) for name in [*fields] if hasattr(values, name)}
            changed = {part: msgspec.structs.replace(values, **own)}
            report = msgspec.structs.replace(report, **changed)
        self.accounts.record(msgspec.structs.replace(report, **fields), 10.0)

    def read(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"antiphon_{name}", labels)

    @property
    def generated(self) -> float | None:
        return self.read("realtime_tokens_total", mode="decode")

    def figures(self) -> WorkerStats:
        return self.accounts.load_stats(worker.report(9, **SIZES), grammars=0, now=19.0)


@pytest.fixture
def desk(caplog: pytest.LogCaptureFixture) -> Desk:
    caplog.set_level(logging.INFO)
    return Desk()


def test_metrics_and_the_heartbeat_have_all_recorded_steps(desk: Desk) -> None:
    desk.add(1, [5])
    desk.add(2, [6, 7])
    assert desk.figures().output_tokens_s == pytest.approx(0.3)
    assert desk.generated == 3
    assert desk.read("step_seconds_count") == 2
    desk.sample(3, 8)
    assert desk.generated == 4
    assert desk.figures().output_tokens_s == pytest.approx(0.4)


def test_the_line_of_a_choice_is_logged_when_it_ends_and_has_all_its_tokens(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    desk.add(1, [5])
    desk.sample(2, 6)
    desk.sample(3, 7)
    desk.accounts.process_pending()
    assert not caplog.records
    desk.add(4, [8, 9], LENGTH)
    desk.accounts.process_pending()
    (line,) = (record.__dict__ for record in caplog.records)
    assert (line["output_tokens"], line["first_token_s"], line["seconds"]) == (5, 1.0, 4.0)


def test_the_line_of_a_dropped_choice_has_the_tokens_that_count(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    desk.add(1, [5])
    desk.sample(2, 6)
    desk.sample(2, 7)
    stop = StopChoice(
        request_id=RequestId("r"),
        attempt=worker.attempt(),
        detokenizer=worker.DETOKENIZER,
        offset=2,
        choice=0,
    )
    desk.output.stop(stop)
    desk.accounts.drop(KEY, 12.0)
    (line,) = (record.__dict__ for record in caplog.records)
    assert (line["reason"], line["output_tokens"], line["seconds"]) == ("dropped", 2, 2.0)
    assert line["first_token_s"] == 1.0


def test_accounts_are_full_when_many_reports_wait(desk: Desk) -> None:
    desk.add(0, [5])
    for step in range(1, REPORTS_MAX):
        assert not desk.accounts.full
        desk.sample(step, 5)
    assert desk.accounts.full
    desk.accounts.process_pending()
    assert not desk.accounts.full
    assert desk.generated == REPORTS_MAX


def test_evicted_tokens_are_counted_once(desk: Desk) -> None:
    for tokens in (16, 16, 48):
        desk.record(evicted_tokens=tokens)
        assert desk.read("evicted_tokens_total") == tokens


def test_windows_and_states_are_shown_where_a_model_has_them(desk: Desk) -> None:
    desk.add(1, [5])
    assert desk.read("swa_used_tokens") is None
    window = PoolUse(total=8, free=3, evictable=1)
    desk.record(window=window, states=PoolUse(total=10, free=4, evictable=5))
    desk.accounts.process_pending()
    desk.accounts.metrics.flush()
    names = ("available_tokens", "evictable_tokens", "used_tokens")
    assert [desk.read(f"swa_{name}") for name in names] == [48, 16, 64]
    assert desk.read("swa_token_usage") == 0.5
    assert desk.read("max_total_num_tokens_swa") == 128
    assert [desk.read(f"mamba_{name}") for name in names] == [4, 5, 1]
    assert desk.read("mamba_usage") == 0.1


def test_the_time_of_the_start_is_shown_by_phase(desk: Desk) -> None:
    desk.accounts.metrics.started(load_s=2.0, warm_up_s=0.5)
    phases = ("load", "warm_up", "total")
    found = [desk.read("startup_time_seconds", phase=phase) for phase in phases]
    assert found == [2.0, 0.5, 2.5]
    assert desk.read("weight_load_duration_seconds", source="disk") == 2.0


def test_tokens_of_retracted_requests_are_counted_by_kind(desk: Desk) -> None:
    for tokens, prompts in ((30, 20), (30, 20), (90, 60)):
        desk.record(retracted_tokens=tokens, retracted_prompt_tokens=prompts)
        assert desk.read("num_retracted_input_tokens_total") == prompts
        assert desk.read("num_retracted_output_tokens_total") == tokens - prompts


def test_tokens_of_running_requests_are_shown(desk: Desk) -> None:
    desk.record(sequence_tokens=70)
    assert desk.read("decode_sum_seq_lens") == 70


def sized_report(**fields: Any) -> StepReport:
    sizes = {"seconds": 0.1, "tokens": 4, "rows": 4, "running": 4, "waiting": 2, **fields}
    return worker.report(pages_free=60, pages_evictable=15, **sizes)


@pytest.fixture
def written(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


@pytest.mark.parametrize("captured", [0, 51, 52])
def test_a_prefill_batch_has_a_line(written: pytest.LogCaptureFixture, captured: int) -> None:
    log = StepLog(40, WorkerSize(pages_total=100, page_tokens=16, captured_tokens=captured))
    prefill = sized_report(
        tokens=52,
        rows=6,
        running=6,
        prefill_rows=2,
        prefill_tokens=48,
        cached_tokens=16,
    )
    capacity = msgspec.structs.replace(prefill.capacity, waiting_tokens=70)
    prefill = msgspec.structs.replace(prefill, capacity=capacity)
    log.step(prefill, 4, 10.0)
    log.step(prefill, 4, 12.0)
    assert [record.message for record in written.records] == [
        "Prefill batch, #new-seq: 2, #new-token: 48, #cached-token: 16, token usage: 0.25, "
        "#running-req: 4, #queue-req: 2, #pending-token: 70, "
        f"cuda graph: {captured >= 52}, "
        f"input throughput (token/s): {throughput}"
        for throughput in ("0.00", "24.00")
    ]


def test_each_so_many_decode_batches_have_a_line(written: pytest.LogCaptureFixture) -> None:
    size = WorkerSize(pages_total=100, page_tokens=16, captured=frozenset({sized_report().rows}))
    log = StepLog(3, size)
    for step in range(1, 8):
        log.step(sized_report(), 4, float(step))
    assert [record.message for record in written.records] == [
        "Decode batch, #running-req: 4, #token: 400, token usage: 0.25, cuda graph: True, "
        f"gen throughput (token/s): {throughput}, #queue-req: 2"
        for throughput in ("0.00", "4.00")
    ]


def test_a_retraction_logs_a_warning(written: pytest.LogCaptureFixture) -> None:
    log = StepLog(40, WorkerSize(pages_total=100, page_tokens=16))
    log.step(sized_report(new_token_ratio=0.5), 0, 1.0)
    log.step(sized_report(retractions=2, retracted_tokens=90, new_token_ratio=0.75), 0, 2.0)
    log.step(sized_report(retractions=2, retracted_tokens=90, new_token_ratio=0.7), 0, 3.0)
    (record,) = written.records
    assert record.levelno == logging.WARNING
    assert record.message == (
        "KV cache pool is full. Retract requests. #retracted_reqs: 2, #new_tokens_gained: 90, "
        "#new_token_ratio: 0.5000 -> 0.7500"
    )


def test_a_sliding_sum_forgets_what_is_old():
    lately = SlidingSum(10)
    lately.add(3, 100.2)
    lately.add(4, 100.9)
    lately.add(5, 105.0)
    assert lately.total(109.9) == 12
    assert lately.total(110.0) == 5
    assert lately.total(115.0) == 0
    lately.add(1, 300.0)
    assert lately.total(300.0) == 1


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(0, 9)), max_size=60))
def test_the_sum_is_that_of_the_last_seconds(events: list[tuple[float, int]]):
    lately, now, every = SlidingSum(10), 0.0, list[tuple[float, int]]()
    for pause, amount in events:
        now += pause
        lately.add(amount, now)
        every.append((now, amount))
        assert lately.total(now) == sum(n for at, n in every if int(at) > int(now) - 10)


NAME = "antiphon_worker_cpu_seconds_total"
PARTS = ("bus", "kernels", "python", "sending")


def cpu_s(registry: CollectorRegistry) -> dict[str, float]:
    values = {part: registry.get_sample_value(NAME, {"part": part}) for part in PARTS}
    return {part: value for part, value in values.items() if value is not None}


def burn(seconds: float) -> float:
    """Return a little more than `seconds`: what this thread has used so far."""
    while (used := time.thread_time()) < seconds:
        pass
    return used


def test_cpu_time_is_reported_by_thread_while_it_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(extension, "kernel_cpu_s", lambda: 0.02)
    registry, batching = CollectorRegistry(), [0]
    registry.register(CpuTime(lambda: filter(None, batching), lambda: 0.15))
    assert cpu_s(registry).keys() == {"bus"}
    burnt: Future[float] = Future()
    go = threading.Event()

    def work() -> None:
        batching[0] = threading.get_native_id()
        burnt.set_result(burn(0.3))
        go.wait()

    thread = threading.Thread(target=work)
    thread.start()
    used = burnt.result()
    before = time.thread_time()
    parts = cpu_s(registry)
    after = time.thread_time()
    go.set()
    thread.join()
    wait_until(lambda: cpu_s(registry).keys() == {"bus"}, 5, "the end of a thread")
    assert parts.keys() == set(PARTS)
    assert (parts["kernels"], parts["sending"]) == (0.02, 0.15)
    assert parts["python"] == pytest.approx(used - 0.02 - 0.15, abs=0.01)
    assert before - 0.01 <= parts["bus"] <= after + 0.01


def test_drafts_of_the_last_minute_are_in_the_load(desk: Desk) -> None:
    desk.record(verify_rows=10, drafts_proposed=30, drafts_accepted=20)
    desk.record(verify_rows=14, drafts_proposed=42, drafts_accepted=21)
    found = desk.figures()
    counts = found.verify_rows, found.drafts_proposed, found.drafts_accepted
    assert counts == (14, 42, 21)
    later = desk.accounts.load_stats(worker.report(9, **SIZES), grammars=0, now=90.0)
    assert (later.verify_rows, later.drafts_proposed) == (0, 0)


def test_weights_are_those_of_both_models() -> None:
    plan = decide()
    draft = plan.draft.value
    assert draft is not None
    found = LoadStats(plan).snapshot(worker.report(1, **SIZES), grammars=0, now=1.0)
    assert found.weight_bytes == plan.weight_bytes.value + draft.weight_bytes.value
