"""A request that goes on by some tokens is where steps one by one would have brought it."""

from __future__ import annotations

import numpy as np
import pytest
from tests.support.worker import state
from tests.unit.model_worker.steps import pools

from antiphon.model_worker.batching.request import BatchRow, Request
from antiphon.model_worker.batching.state import ChoiceKey
from antiphon.model_worker.cache.table import PageTable
from antiphon.wire.codec import pack_ids

END = 1


def request(outputs: tuple[int, ...] = (5,), emitted: int = 1) -> Request:
    return Request(
        ChoiceKey(1),
        state([7, 8], output_ids=pack_ids(outputs), emitted=emitted, max_new_tokens=9),
        arrival=0,
        queued_s=0.0,
        outputs_max=9,
        end_ids=frozenset({END}),
        place=(0.0, 0.0, 0),
    )


def running(outputs: tuple[int, ...] = (5,)) -> Request:
    """One that has drawn its first token, of which it has told."""
    one, table = request(outputs, emitted=len(outputs)), PageTable(pools(8))
    table.allocate(8)
    one.start(0, table, 0.0)
    one.launch(one.length - 1, draws=False)
    table.commit(one.length - 1)
    one.computed, one.prefilling = one.length - 1, False
    return one


@pytest.mark.parametrize("tokens", [[0], [5, 70_000, 2**31 - 1]])
def test_decode_steps_without_a_finish_can_be_appended_at_once(tokens: list[int]) -> None:
    one, other = running(), running()
    one.go_on(np.array(tokens, np.int32))
    for token in tokens:
        BatchRow.launched(other, other.length)
        assert other.table is not None
        other.table.commit(other.length)
        other.computed, other.ahead = other.length, other.ahead - 1
        other.accept([token])
        assert other.progress("w") is not None
    assert one.snapshot() == other.snapshot()
    for name in ("length", "computed", "planned", "ahead", "pending", "emitted", "finish"):
        assert getattr(one, name) == getattr(other, name), name
    assert one.table is not None
    assert other.table is not None
    assert one.table.committed == other.table.committed == one.length - 1
    assert one.progress("w") is None
