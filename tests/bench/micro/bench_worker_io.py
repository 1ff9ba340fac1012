"""What a step costs the worker beside planning: `pytest tests/bench/micro/bench_worker_io.py`.

Of 64 rows that each draw a token: the plan kept by the recorder, and all that the bus side does
until the bytes of the message are there. Measured by a thread's own processor time, median, on a
machine with neighbours:

| | expected | measured |
|---|---|---|
| keep a plan, 64 rows of 2,000 tokens | 5 us | 1.1 us |
| take in a report of steady rows and write its message, 64 rows | 12 us | 8 us |
| the same, 1 row | 6 us | 4 us |

These are figures of a loop that does nothing else. Once in ten milliseconds, with every cache cold
and a connection to write to, the bus side takes three to four times as long.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.support.worker import LEADER, WORKER, admit, decode_plan, report

from antiphon.model_worker.batching.state import Progress
from antiphon.model_worker.batching.steady import Drawn
from antiphon.model_worker.observability.flight_recorder import FlightRecorder
from antiphon.model_worker.observability.metrics import WorkerMetrics, WorkerSize
from antiphon.model_worker.observability.step_accounting import WorkerRequestLog
from antiphon.model_worker.protocol.worker_output import RunChoice, WorkerOutput
from antiphon.service.sequence import SeqSender
from antiphon.telemetry.metrics import Metrics
from antiphon.wire.codec import encode
from antiphon.wire.command import CommandBatch
from antiphon.wire.sampling import SamplingParams

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

    from antiphon.model_worker.batching.loop import StepReport

ROUNDS = 5_000
SLACK = 2.5
FAR = 2**52


class BusSide:
    """A worker's bus side with so many requests, of which each draws a token a step."""

    def __init__(self, rows: int) -> None:
        self.output = WorkerOutput(WORKER, SeqSender(), live_max=rows)
        self.journal = WorkerRequestLog()
        self.metrics = WorkerMetrics(Metrics(), WorkerSize(pages_total=1000))
        sampling = SamplingParams(max_new_tokens=10**9)
        admits = tuple(
            admit(f"request-{number:032}", sampling=sampling, deadline_unix_ms=FAR)
            for number in range(rows)
        )
        batch = CommandBatch(
            leader=LEADER, worker=WORKER, seq=1, commands=admits, not_after_unix_ms=FAR
        )
        runs = [action for action in self.output.command(batch, 1) if isinstance(action, RunChoice)]
        for run in runs:
            self.journal.begin(run, 0.0)
        self.keys = tuple(run.key for run in runs)
        self.before = [Progress(key=key) for key in self.keys]
        self.steps = 0

    def report(self) -> StepReport:
        self.steps += 1
        count = len(self.keys)
        ids = np.full(count, self.steps % 1000, np.int32)
        drawn = Drawn(self.keys, self.before, ids)
        sizes = {"seconds": 0.01, "tokens": count, "rows": count, "running": count}
        return report(self.steps, pages_free=1, pages_evictable=1, progress=drawn, **sizes)

    def take(self, report: StepReport) -> list[bytes]:
        """All that is done of a step until its messages are bytes."""
        self.output.step(report.step, report.progress, relays=True)
        self.metrics.observe(report, self.journal.step(report.progress, 1.0))
        return [encode(batch) for _, batch in self.output.take()]


@pytest.mark.benchmark(timer=time.thread_time)
def test_keeping_a_plan(benchmark: BenchmarkFixture) -> None:
    recorder, plan = FlightRecorder(), decode_plan(rows=64, new=1, kv=2000)
    benchmark.pedantic(recorder.begin, args=(plan,), rounds=ROUNDS)
    if benchmark.stats is not None:  # None where benchmarks are disabled
        assert benchmark.stats["median"] < SLACK * 5e-6


@pytest.mark.parametrize(("rows", "expected_us"), [(1, 6), (64, 12)])
@pytest.mark.benchmark(timer=time.thread_time)
def test_sending_what_a_step_has_drawn(
    benchmark: BenchmarkFixture, rows: int, expected_us: float
) -> None:
    side = BusSide(rows)
    for _ in range(2):  # the first rows say what each request is, the next ones whose ids follow
        side.take(side.report())
    benchmark.pedantic(
        side.take, setup=lambda: ((side.report(),), {}), rounds=ROUNDS, warmup_rounds=50
    )
    if benchmark.stats is not None:
        assert benchmark.stats["median"] < SLACK * expected_us * 1e-6
