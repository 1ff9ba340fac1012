"""Step plans, by their size alone."""

from __future__ import annotations

import numpy as np
from tests.bench.models import VOCABULARY

from antiphon.model_worker.batching.plan import SamplingColumns, StepPlan

PAGE_TOKENS = 16


def decode_plan(rows: int, new: int, kv: int) -> StepPlan:
    """Return a greedy step of `new` tokens a row, up to `kv`; its pages lie in no order."""
    random = np.random.default_rng(0)
    each = -(-kv // PAGE_TOKENS)
    table = random.permutation(rows * each).astype(np.int32).reshape(rows, each)
    every = np.ones(rows, np.int32)
    ends = np.cumsum(every * new, dtype=np.int32)
    positions = np.tile(np.arange(kv - new, kv, dtype=np.int32), rows)
    return StepPlan(
        step=1,
        slot=np.arange(rows, dtype=np.int32),
        query_start=ends - new,
        query_len=every * new,
        kv_len=every * kv,
        adapter=-every,
        tokens=random.integers(0, VOCABULARY, rows * new).astype(np.int32),
        positions=positions[np.newaxis],
        logit_tokens=ends - 1,
        sampling=SamplingColumns(
            temperature=np.zeros(rows, np.float32),
            top_p=np.ones(rows, np.float32),
            min_p=np.zeros(rows, np.float32),
            top_k=np.zeros(rows, np.int32),
            seed=np.zeros(rows, np.int64),
            choice=np.zeros(rows, np.int32),
        ),
        page_tables=(table,),
    )
