from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.worker import penalties

from antiphon.kernels.op import DeviceCapability
from antiphon.kernels.ops import select
from antiphon.model_worker.runner.sampling import TokenCounts

if TYPE_CHECKING:
    from antiphon.model_worker.batching.plan import Penalties

OPS = select(DeviceCapability("cpu"))
VOCABULARY = 9
SLOTS = 20

SLOT = st.integers(0, SLOTS - 1)
TOKEN = st.integers(0, VOCABULARY - 1)
BEGIN = st.dictionaries(SLOT, st.lists(TOKEN, max_size=12), max_size=3)
DRAW = st.dictionaries(SLOT, TOKEN, max_size=SLOTS)


def by_count(begun: dict[int, list[int]], rows: int) -> Penalties:
    return penalties(rows, begun, frequency=1.0, presence=0.0, repetition=1.0)


@given(st.lists(st.tuples(BEGIN, DRAW), max_size=12))
def test_each_slot_counts_what_it_has_drawn_since_it_began(steps) -> None:
    """Requests begin, with and without outputs, draw, and are followed by others."""
    drawn = TokenCounts()
    naive: dict[int, Counter[int]] = {}
    for begun, draws in steps:
        drawn.begin(by_count(begun, 0))
        naive |= {slot: Counter(ids) for slot, ids in begun.items()}
        live = {slot: token for slot, token in draws.items() if slot in naive}
        drawn.count(np.array(list(live), np.int32), np.array(list(live.values()), np.int32))
        for slot, token in live.items():
            naive[slot][token] += 1
        slots = np.array(list(naive), np.int32)
        logits = torch.zeros(len(slots), VOCABULARY)
        drawn.apply(OPS, logits, np.arange(len(slots)), slots, by_count({}, len(slots)))
        expected = [[-naive[slot][token] for token in range(VOCABULARY)] for slot in naive]
        assert logits.tolist() == [[0.0 + count for count in row] for row in expected]


def test_many_different_tokens_find_room() -> None:
    drawn = TokenCounts()
    ids = list(range(500))
    drawn.begin(by_count({3: ids[:70]}, 1))
    for token in ids[70:]:
        drawn.count(np.array([3], np.int32), np.array([token], np.int32))
    logits = torch.zeros(1, 600)
    drawn.apply(OPS, logits, np.arange(1), np.array([3], np.int32), by_count({}, 1))
    assert logits[0].tolist() == [-1.0] * 500 + [0.0] * 100
