"""The workers whose steps are timed: each step sends what its case says."""

from __future__ import annotations

import pytest
from tests.bench.planning import CASES, Case, StepWorker

from antiphon.wire.codec import decode, id_count
from antiphon.wire.routes import TOKENS
from antiphon.wire.tokens import TokenColumns, TokenStep


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_each_timed_step_sends_a_token_of_each_request(case: Case) -> None:
    worker = StepWorker(case)
    for times in worker.timed_steps(20):
        message = decode(worker.messages[0], TOKENS.carries)
        rows = () if isinstance(message, TokenStep) else message.rows
        plain = message if isinstance(message, TokenStep) else message.columns or TokenColumns()
        tokens = id_count(plain.token_ids) + sum(id_count(row.token_ids) for row in rows)
        assert tokens == case.decodes + case.turnover
        assert sum(row.finish_reason is not None for row in rows) == case.turnover
        if case.sampling.details is not None:
            assert isinstance(plain, TokenColumns)
            assert len(plain.logprobs) == len(plain.token_ids)
            assert all(row.details is not None and row.details.logprobs for row in rows)
        assert 0 < times.plan_us < times.step_us < times.message_us
