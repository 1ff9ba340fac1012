"""The lines of batches have SGLang's form."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
from tests.support import worker

from antiphon.model_worker.batching.planner import Backlog
from antiphon.model_worker.observability.metrics import WorkerSize
from antiphon.model_worker.observability.step_accounting import StepLog

if TYPE_CHECKING:
    from antiphon.model_worker.batching.loop import StepReport


def report(**fields: Any) -> StepReport:
    sizes = {"seconds": 0.1, "tokens": 4, "rows": 4, "running": 4, "waiting": 2, **fields}
    return worker.report(pages_free=60, pages_evictable=15, **sizes)


@pytest.fixture
def written(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


def test_a_prefill_batch_has_a_line(written: pytest.LogCaptureFixture) -> None:
    log = StepLog(40, WorkerSize(pages_total=100, page_tokens=16))
    prefill = report(
        tokens=52,
        rows=6,
        running=6,
        prefill_rows=2,
        prefill_tokens=48,
        cached_tokens=16,
        backlog=Backlog(tokens=70),
    )
    log.step(prefill, 4, 10.0)
    log.step(prefill, 4, 12.0)
    assert [record.message for record in written.records] == [
        "Prefill batch, #new-seq: 2, #new-token: 48, #cached-token: 16, token usage: 0.25, "
        "#running-req: 4, #queue-req: 2, #pending-token: 70, cuda graph: False, "
        f"input throughput (token/s): {throughput}"
        for throughput in ("0.00", "24.00")
    ]


def test_each_so_many_decode_batches_have_a_line(written: pytest.LogCaptureFixture) -> None:
    log = StepLog(3, WorkerSize(pages_total=100, page_tokens=16))
    for step in range(1, 8):
        log.step(report(), 4, float(step))
    assert [record.message for record in written.records] == [
        "Decode batch, #running-req: 4, #token: 400, token usage: 0.25, cuda graph: False, "
        f"gen throughput (token/s): {throughput}, #queue-req: 2"
        for throughput in ("0.00", "4.00")
    ]


def test_a_retraction_is_warned_of(written: pytest.LogCaptureFixture) -> None:
    log = StepLog(40, WorkerSize(pages_total=100, page_tokens=16))
    log.step(report(new_token_ratio=0.5), 0, 1.0)
    log.step(report(retractions=2, retracted_tokens=90, new_token_ratio=0.75), 0, 2.0)
    log.step(report(retractions=2, retracted_tokens=90, new_token_ratio=0.7), 0, 3.0)
    (record,) = written.records
    assert record.levelno == logging.WARNING
    assert record.message == (
        "KV cache pool is full. Retract requests. #retracted_reqs: 2, #new_tokens_gained: 90, "
        "#new_token_ratio: 0.5000 -> 0.7500"
    )
