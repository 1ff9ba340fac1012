from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tests.models.stepper import Line, spy_on_logits, stepper
from tests.models.tiny import VOCABULARY
from tests.support.kv_cache import stored
from tests.support.models import open_model
from tests.support.worker import ints, step_plan

from antiphon.model_worker.batching.plan import RowStatus, draft, future
from antiphon.model_worker.cache.groups import UNKNOWN_STATE
from antiphon.model_worker.runner.input_batch import InputBatch, SlotState

if TYPE_CHECKING:
    from pathlib import Path

    from antiphon.model_worker.runner.opening import OpenModel
    from antiphon.model_worker.runner.pools import KvPool

RANDOM = np.random.default_rng(2)
POISON = VOCABULARY - 1
PROMPTS = [RANDOM.integers(0, POISON, length).tolist() for length in (12, 5, 33)]
PROMPTS[1][2] = POISON


def opened(folder: Path) -> OpenModel:
    return open_model(folder, dtype="float32")


def sample_warmly(line: Line, seed: int) -> None:
    line.temperature, line.top_p, line.top_k, line.min_p = 0.9, 0.95, 50, 0.01
    line.seed, line.choice = seed, 2


@pytest.fixture
def poisoned(llama: Path) -> OpenModel:
    """A model in which one token's embedding is NaN: its row fails, and only its own."""
    model = opened(llama)
    embedding = model.runner._model.own_decoder.embedding
    assert embedding is not None
    assert embedding.table is not None
    embedding.table[POISON] = torch.nan
    return model


def test_a_row_that_is_not_finite_is_reported_and_the_others_go_on(
    llama: Path, poisoned: OpenModel
) -> None:
    bad, good = stepper(poisoned, PROMPTS), stepper(opened(llama), PROMPTS)
    for batch in (bad, good):
        batch.step({slot: len(ids) for slot, ids in enumerate(PROMPTS)})
    assert [line.statuses for line in bad.lines.values()] == [
        [RowStatus.OK],
        [RowStatus.NON_FINITE],
        [RowStatus.OK],
    ]
    assert bad.lines[1].ids == PROMPTS[1]
    for _ in range(10):
        good.step({0: 1, 2: 1})
        assert POISON not in good.lines[0].ids + good.lines[2].ids, "choose another poison"
        bad.step({0: 1, 2: 1})
    assert bad.lines[0].ids == good.lines[0].ids
    assert bad.lines[2].ids == good.lines[2].ids


def test_what_a_failed_row_wrote_is_wiped(poisoned: OpenModel) -> None:
    batch = stepper(poisoned, PROMPTS)
    batch.step({slot: len(ids) for slot, ids in enumerate(PROMPTS)})
    pool = poisoned.runner.pools[0]
    size = pool.group.page_tokens
    slots = {
        slot: torch.tensor(line.pages[0])[:, None] * size + torch.arange(size)
        for slot, line in batch.lines.items()
    }
    written = {slot: stored(pool, places.ravel()) for slot, places in slots.items()}
    assert not written[1].any()
    pages = (written[0], written[2])
    assert all(page.any() for data in pages for page in data.split(size, dim=2))


def test_a_chunk_that_is_not_finite_is_reported_before_it_has_logits(poisoned: OpenModel) -> None:
    """Its pages would be shared with other requests by the time that there are logits."""
    batch = stepper(poisoned, [PROMPTS[1]])
    outcome = batch.step({0: 4})
    assert outcome.status.tolist() == [RowStatus.NON_FINITE]


def test_a_plan_made_before_a_failure_was_known_still_runs(poisoned: OpenModel) -> None:
    batch = stepper(poisoned, PROMPTS)
    batch.step({slot: len(ids) for slot, ids in enumerate(PROMPTS)})
    outcome = batch.step({0: 1, 1: 1, 2: 1}, as_future=True)
    assert outcome.status[[0, 2]].tolist() == [RowStatus.OK] * 2


def sampled_alone(folder: Path, slot: int, tokens: int) -> list[int]:
    batch = stepper(opened(folder), [PROMPTS[slot]])
    sample_warmly(batch.lines[0], seed=slot)
    batch.step({0: len(PROMPTS[slot])})
    batch.decode(tokens - 1)
    return batch.lines[0].ids


def test_sampled_text_does_not_depend_on_the_batch(llama: Path) -> None:
    batch = stepper(opened(llama), PROMPTS)
    for slot, line in batch.lines.items():
        sample_warmly(line, seed=slot)
    batch.step({slot: len(ids) for slot, ids in enumerate(PROMPTS)})
    batch.decode(15)
    for slot, line in batch.lines.items():
        assert line.ids == sampled_alone(llama, slot, 16)


def test_seed_and_choice_change_sampled_text_and_nothing_else_does(llama: Path) -> None:
    texts: list[list[int]] = []
    for seed, choice in ((1, 0), (1, 0), (2, 0), (1, 1)):
        batch = stepper(opened(llama), [PROMPTS[0]])
        sample_warmly(batch.lines[0], seed)
        batch.lines[0].choice = choice
        batch.step({0: len(PROMPTS[0])})
        batch.decode(15)
        texts.append(batch.lines[0].ids)
    assert texts[0] == texts[1]
    assert len({tuple(text) for text in texts}) == 3


def test_a_continued_sequence_draws_what_it_would_have_drawn(llama: Path) -> None:
    """A migration: the tokens so far are the prompt of another runner."""
    whole = sampled_alone(llama, 0, 16)
    batch = stepper(opened(llama), [whole[:20]])
    sample_warmly(batch.lines[0], seed=0)
    batch.step({0: 20})
    batch.decode(len(whole) - 21)
    assert batch.lines[0].ids == whole


def test_top_k_of_one_is_greedy(llama: Path) -> None:
    batch = stepper(opened(llama), [PROMPTS[0], PROMPTS[0]])
    sample_warmly(batch.lines[1], seed=3)
    batch.lines[1].top_k = 1
    batch.step({0: 12, 1: 12})
    batch.decode(10)
    assert batch.lines[0].ids == batch.lines[1].ids


def test_logits_are_computed_for_wanted_tokens_only(llama: Path) -> None:
    model = opened(llama)
    seen = spy_on_logits(model.runner)
    batch = stepper(model, PROMPTS)
    batch.step({0: 12, 1: 5, 2: 20})
    assert [len(logits) for logits in seen] == [2]


NO_STATES = slice(0, 0)


def resolved(state: SlotState, tokens: np.ndarray) -> list[int]:
    """The tokens of a plan of one row."""
    return state.resolve(step_plan([len(tokens)], tokens=tokens), NO_STATES).tokens.tolist()


def recorded(state: SlotState, slots: np.ndarray, rows: list[list[int]], failed=()) -> None:
    starts = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    ids = ints(*(token for row in rows for token in row))
    missing = np.isin(np.arange(len(rows)), failed) if failed else None
    state.record(slots, starts, ids, missing)


def test_a_future_is_the_last_token_that_its_slot_accepted() -> None:
    futures = SlotState()
    recorded(futures, ints(4, 200, 1), [[7], [8, 9], []])
    tokens = ints(1, future(200), 2, future(4))
    assert resolved(futures, tokens) == [1, 9, 2, 7]
    assert tokens.tolist() == [1, -201, 2, -5]


def test_a_slot_that_accepts_nothing_keeps_its_token() -> None:
    futures = SlotState()
    recorded(futures, ints(3), [[7]])
    recorded(futures, ints(3), [[]])
    assert resolved(futures, ints(future(3))) == [7]


def test_a_future_of_a_failed_row_is_some_valid_token() -> None:
    futures = SlotState()
    recorded(futures, ints(3), [[]], failed=(0,))
    assert resolved(futures, ints(future(3))) == [0]


@pytest.mark.parametrize("slot", [5, 63])
def test_a_future_of_a_slot_that_never_sampled_is_our_bug(slot: int) -> None:
    with pytest.raises(AssertionError, match="sampled nothing"):
        resolved(SlotState(), ints(future(slot)))


def test_futures_of_slots_beyond_all_before_keep_the_earlier_ones() -> None:
    futures = SlotState()
    recorded(futures, ints(3, 4), [[7], [8]])
    recorded(futures, ints(4, 1000), [[9], [10]])
    tokens = ints(future(3), future(4), future(1000))
    assert [resolved(futures, tokens) for _ in range(2)] == [[7, 9, 10]] * 2


def test_futures_are_the_tokens_of_decodes_whose_slots_are_the_same_array() -> None:
    futures, slots = SlotState(), ints(3, 1000)
    for tokens in (ints(7, 8), ints(9, 10)):
        futures.record_each(slots, tokens)
        assert resolved(futures, ints(future(1000), future(3))) == [*reversed(tokens.tolist())]
    recorded(futures, ints(2000), [[5]])
    futures.record_each(slots, ints(1, 2))
    assert resolved(futures, ints(future(1000), future(2000))) == [2, 5]


def test_batch_is_freed_with_the_last_reference_to_it() -> None:
    batch = InputBatch(step_plan([1], kv_len=ints(4)), (), 0)
    freed = weakref.ref(batch)
    assert batch.own is batch
    del batch
    assert freed() is None


def test_rows_that_follow_are_placed_where_the_row_before_has_ended() -> None:
    state, states = SlotState(), slice(1, 2)
    tables = (
        ints(1, 2)[np.newaxis].repeat(2, 0),
        np.array([[4, 5, 6, 7], [8, 9, -1, -1]], np.int32),
    )
    first = step_plan(
        [3, 1], slot=ints(2, 5), kv_len=ints(9, 4), page_tables=tables, tokens=ints(1, 2, 3, 4)
    )
    state.record(first.slot, ints(0, 2, 3), ints(6, 7, 8), None)
    state.record_places(first, ints(2, 1), states)
    state.record_drafts(first.slot, np.array([[11, 12], [13, -1]], np.int32))
    unknown = np.array([[UNKNOWN_STATE, 3], [UNKNOWN_STATE, 1]], np.int32)
    tokens = ints(future(2), draft(2), draft(2), future(5))
    plan = step_plan(
        [3, 1],
        slot=ints(2, 5),
        kv_len=ints(12, 5),
        tokens=tokens,
        page_tables=(tables[0], unknown),
        future_start=np.array([True, False]),
    )
    placed = state.resolve(plan, states)
    assert placed.tokens.tolist() == [7, 11, 12, 8]
    assert placed.kv_len.tolist() == [11, 5]  # of the three tokens before one was wrong
    assert InputBatch(placed, (), 1).positions.tolist() == [8, 9, 10, 4]
    assert placed.page_tables[1].tolist() == [[6, 3], [9, 1]]
    assert (placed.future_start, unknown[0, 0]) == (None, UNKNOWN_STATE)


def test_a_row_may_follow_beside_one_in_a_slot_beyond_all_before() -> None:
    state = SlotState()
    first = step_plan([1], slot=ints(2), kv_len=ints(4))
    state.record(first.slot, ints(0, 1), ints(6), None)
    state.record_places(first, ints(1), NO_STATES)
    plan = step_plan(
        [1, 3],
        slot=ints(2, 1000),
        kv_len=ints(9, 3),
        tokens=ints(future(2), 7, 8, 9),
        future_start=np.array([True, False]),
    )
    placed = state.resolve(plan, NO_STATES)
    assert (placed.tokens.tolist(), placed.kv_len.tolist()) == ([6, 7, 8, 9], [5, 3])


@pytest.fixture(params=["float32", "bfloat16"])
def pool(llama: Path, request: pytest.FixtureRequest) -> KvPool:
    model = open_model(llama, pages=6, dtype=request.param)
    pool = model.runner.pools[0]
    for layer in range(4):
        for half in pool.layer(layer):
            half.copy_(torch.randn(half.shape))
    return pool


def test_zeroing_forgets_the_named_tokens_only(pool: KvPool) -> None:
    every, zeroed = torch.arange(6 * 4), [2 * 4 + 1, 2 * 4 + 3]
    before = stored(pool, every)
    pool.zero(torch.tensor(zeroed))
    after = stored(pool, every)
    assert not after[:, :, zeroed].any()
    before[:, :, zeroed] = 0
    assert torch.equal(after, before)
