"""The workers whose steps are timed: each step sends what its case says."""

from __future__ import annotations

import pytest
from tests.bench.planning import CASES, Case, StepWorker

from antiphon.wire.codec import decode, id_count
from antiphon.wire.routes import TOKENS
from antiphon.wire.token_outputs import unpack_floats
from antiphon.wire.tokens import TokenBatch, TokenColumns


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_each_timed_step_sends_a_token_of_each_request(case: Case) -> None:
    worker = StepWorker(case)
    for times in worker.timed_steps(20):
        message = decode(worker.messages[0], TOKENS.carries)
        assert isinstance(message, TokenBatch)
        columns, rows = message.columns or TokenColumns(), message.rows
        tokens = len(columns) + sum(id_count(row.token_ids) for row in rows)
        assert tokens == case.decodes + case.turnover
        assert sum(row.finish_reason is not None for row in rows) == case.turnover
        assert len(rows) == 2 * case.turnover, "all but the first and the last tokens are plain"
        logprobs = len(columns) if case.sampling.details is not None else 0
        assert len(unpack_floats(columns.logprobs)) == logprobs
        assert 0 < times.plan_us < times.step_us < times.message_us
