"""Waiting beside prompts with a common prefix: `pytest tests/bench/micro/bench_following.py`.

32 prompts of 4,096 tokens are computed in pieces of 16 tokens, and one more waits for pages. All
begin with the same 24 tokens: a page, and too little to wait for. Before, the one that waited was
compared with each of the others in each step.

Expected were 50 us a plan and 3 us a row, 150 together, and 8 us for each comparison of 4,096 ids,
which were 250 beside. That each row takes a new page in each step was forgotten, and that the tree
grows with each, so that the one that waits is looked up again. Measured is processor time, of 200
steps on two cores that many others used: believe the fastest.

===============  ========  ============  ============
us a step        expected        before         after
===============  ========  ============  ============
fastest, median       400    485 / 923     476 / 603
===============  ========  ============  ============

The gate is two and a half times what is expected now.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from antiphon.model_worker.batching.engine_core import EngineCore
from antiphon.model_worker.batching.plan import StepOutcome
from antiphon.model_worker.batching.state import ChoiceKey, EngineLimits, RequestState
from antiphon.model_worker.cache.groups import CacheGroup, GroupKind
from antiphon.model_worker.cache.radix import RadixIndex
from antiphon.model_worker.cache.table import CachePools
from antiphon.wire.codec import pack_ids
from antiphon.wire.ids import RequestId
from antiphon.wire.sampling import SamplingParams

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

    from antiphon.model_worker.batching.request import BatchRow

PAGE_TOKENS = 16
PROMPT_TOKENS = 4096
PIECE_TOKENS = 16
RUNNING = 32
EXPECTED_US = 400
SLACK = 2.5
ROUNDS = 200


def crowded() -> EngineCore:
    """A worker whose pages are all in use by prefilling requests."""
    pages = RUNNING * (PROMPT_TOKENS // PAGE_TOKENS + 1)
    group = CacheGroup(
        kind=GroupKind.FULL, layers=(0,), page_bytes=1, page_tokens=PAGE_TOKENS, pages_total=pages
    )
    pools = CachePools([group])
    limits = EngineLimits(
        step_tokens_max=RUNNING * PIECE_TOKENS,
        chunk_tokens=PIECE_TOKENS,
        running_max=RUNNING + 1,
        context_tokens=2 * PROMPT_TOKENS,
        vocab_size=50_000,
        end_ids=frozenset({2}),
        weights_digest="w",
    )
    batching = EngineCore(limits, pools, RadixIndex(pools))
    for key in range(RUNNING + 1):
        state = RequestState(
            request_id=RequestId(str(key)),
            choice=0,
            prompt_ids=pack_ids([7] * 24 + [1000 + key] * (PROMPT_TOKENS - 24)),
            sampling=SamplingParams(max_new_tokens=1),
            deadline_unix_ms=0,
        )
        batching.add(ChoiceKey(key), state, 0.0)
    return batching


@pytest.mark.benchmark(timer=time.thread_time)
def test_a_step_beside_prompts_that_begin_alike(benchmark: BenchmarkFixture) -> None:
    batching = crowded()
    rows: list[BatchRow] = []
    steps = iter(range(1, 1000))

    def plan() -> None:
        rows[:] = batching.next_rows(0.0)

    def commit() -> None:
        step = next(steps)
        batching.pools.launched(step)
        batching.pools.finished(step)
        none = np.zeros(0, np.int32)
        starts, status = np.zeros(len(rows) + 1, np.int32), np.zeros(len(rows), np.int32)
        batching.commit(rows, StepOutcome(step=step, starts=starts, token_ids=none, status=status))

    plan()
    commit()
    assert len(batching.running) in (RUNNING - 1, RUNNING)
    assert len(batching.waiting), "no request waits"
    benchmark.extra_info["expected_us"] = EXPECTED_US
    benchmark.pedantic(plan, teardown=commit, rounds=ROUNDS)
    if benchmark.stats is not None:  # None where benchmarks are disabled
        assert benchmark.stats["median"] * 1e6 < SLACK * EXPECTED_US
