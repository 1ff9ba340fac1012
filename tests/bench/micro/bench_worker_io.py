"""What a step costs the worker beside planning: `pytest tests/bench/micro/bench_worker_io.py`.

The plan kept by the recorder, and all that the protocol side does with a step that samples a token
of each row, until the bytes of the message are there. Measured by a thread's own processor time,
median, on a machine with neighbours:

| | expected | measured |
|---|---|---|
| keep a plan, 64 rows of 2,000 tokens | 5 us | 1.1 us |
| take in a report and encode its message, 1 row | 8 us | 7.5 us |
| the same, 256 rows | 25 us | 9 us |
| the same, 256 rows with logprobs | 35 us | 10 us |

These are figures of a loop that does nothing else. Once in ten milliseconds, with every cache cold
and a connection to write to, the protocol side takes three to four times as long.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from tests.support.worker import LEADER, WORKER, FakeEngine, admit, decode_plan, page_group, report

from antiphon.model_worker.observability.flight_recorder import FlightRecorder
from antiphon.model_worker.observability.metrics import WorkerSize
from antiphon.model_worker.observability.step_accounting import StepAccounting
from antiphon.model_worker.protocol.worker_output import RunChoice, WorkerOutput
from antiphon.service.sequence import SeqSender
from antiphon.telemetry.metrics import Metrics
from antiphon.wire.codec import encode
from antiphon.wire.command import CommandBatch
from antiphon.wire.sampling import SamplingParams, TokenOutputParams

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

    from antiphon.model_worker.batching.loop import StepReport

ROUNDS = 5_000
SLACK = 2.5
FAR = 2**52


class ProtocolSide:
    """A worker's protocol side with so many requests, of which each samples a token a step."""

    def __init__(self, rows: int, *, logprobs: bool) -> None:
        self.output = WorkerOutput(WORKER, SeqSender(), live_max=rows)
        self.accounting = StepAccounting(Metrics(), WorkerSize(pages_total=1000), None)
        self.engine = FakeEngine()
        outputs = TokenOutputParams(logprobs=True) if logprobs else None
        sampling = SamplingParams(max_new_tokens=10**9, details=outputs)
        admits = tuple(
            admit(f"request-{number:032}", sampling=sampling, deadline_unix_ms=FAR)
            for number in range(rows)
        )
        batch = CommandBatch(
            leader=LEADER, worker=WORKER, seq=1, commands=admits, not_after_unix_ms=FAR
        )
        runs = [action for action in self.output.command(batch, 1) if isinstance(action, RunChoice)]
        for run in runs:
            self.accounting.begin(run, 0.0)
        self.logprobs = dict.fromkeys((int(run.key) for run in runs), -0.5) if logprobs else None
        self.tokens = {int(run.key): 7 for run in runs}
        self.steps = 1
        first = [self.engine.progress(key, [7], logprobs=[-0.5]) for key in self.tokens]
        self.take_in(report(1, progress=first))

    def report(self) -> StepReport:
        self.steps += 1
        count = len(self.tokens)
        sampled = self.engine.sampled(self.tokens, self.logprobs)
        sizes = {"seconds": 0.01, "tokens": count, "rows": count, "running": count}
        return report(self.steps, pages_free=1, pages_evictable=1, progress=[sampled], **sizes)

    def take_in(self, report: StepReport) -> list[bytes]:
        """All that is done of a step until its messages are bytes."""
        self.output.step(report.step, report.progress)
        messages = [encode(batch) for _, batch in self.output.take()]
        self.accounting.record(report, 1.0)
        if self.accounting.full:
            self.accounting.process_pending()
        return messages


@pytest.mark.benchmark(timer=time.thread_time)
def test_keeping_a_plan(benchmark: BenchmarkFixture) -> None:
    recorder, plan = FlightRecorder((page_group(4096),)), decode_plan(rows=64, new=1, kv=2000)
    benchmark.pedantic(recorder.begin, args=(plan,), rounds=ROUNDS)
    if benchmark.stats is not None:  # None where benchmarks are disabled
        assert benchmark.stats["median"] < SLACK * 5e-6


@pytest.mark.parametrize(
    ("rows", "logprobs", "expected_us"), [(1, False, 8), (256, False, 25), (256, True, 35)]
)
@pytest.mark.benchmark(timer=time.thread_time)
def test_sending_what_a_step_has_sampled(
    benchmark: BenchmarkFixture, rows: int, logprobs: bool, expected_us: float
) -> None:
    side = ProtocolSide(rows, logprobs=logprobs)
    benchmark.pedantic(
        side.take_in, setup=lambda: ((side.report(),), {}), rounds=ROUNDS, warmup_rounds=50
    )
    if benchmark.stats is not None:
        assert benchmark.stats["median"] < SLACK * expected_us * 1e-6
