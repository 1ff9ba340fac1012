"""The sampler on a small vocabulary: how often each token is drawn, whatever steers the draw."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.worker import ints, penalties, sampling_columns, step_plan

from antiphon.kernels.op import DeviceCapability
from antiphon.kernels.ops import select
from antiphon.model_worker.batching.plan import (
    Biases,
    Penalties,
    SamplingColumns,
    SamplingPart,
    StepPlan,
)
from antiphon.model_worker.batching.token_masks import pack
from antiphon.model_worker.runner.sampling import Sampler, TokenCounts, accept

OPS = select(DeviceCapability("cpu"))
VOCABULARY = 12
DRAWS = 20_000
LOGITS = np.random.default_rng(3).normal(size=VOCABULARY).astype(np.float32)
OUTPUTS = [3, 3, 3, 5, 8]
SEEN = np.bincount(OUTPUTS, minlength=VOCABULARY)
FORBIDDEN = [0, 4, 11]


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def columns(rows: int, temperature: float = 1.0, **values: float) -> SamplingColumns:
    return sampling_columns(rows, temperature=temperature, seed=np.arange(rows), **values)


def plan_of(sampling: SamplingColumns, **steering: Any) -> StepPlan:
    """Rows that decode one token each."""
    return step_plan([1] * len(sampling.seed), sampling=sampling, **steering)


def penalised_rows(
    rows: int, frequency: float = 0.4, presence: float = 0.3, repetition: float = 1.5
) -> Penalties:
    factors = {"frequency": frequency, "presence": presence, "repetition": repetition}
    return penalties(rows, dict.fromkeys(range(rows), OUTPUTS), **factors)


def masks(rows: int) -> dict[str, object]:
    words = pack(~np.isin(np.arange(VOCABULARY), FORBIDDEN))
    return {
        "token_masks": np.tile(words, (rows, 1)),
        "token_mask_logits": np.arange(rows, dtype=np.int32),
    }


def biases(rows: int) -> Biases:
    return Biases(
        logits=np.repeat(np.arange(rows, dtype=np.int32), 2),
        token_ids=np.tile(ints(2, 6), rows),
        values=np.tile(floats(1.5, -np.inf), rows),
    )


def drawn(plan: StepPlan, positions: np.ndarray | None = None) -> np.ndarray:
    rows = len(plan.slot)
    sampler = Sampler(OPS)
    logits = torch.as_tensor(np.tile(LOGITS, (rows, 1)))
    every = np.arange(rows)
    sampler.process_logits(plan, every, plan.tokens, logits)
    positions = np.full(rows, 9) if positions is None else positions
    return sampler.sample(plan.sampling, logits, every, positions)


def softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
    scaled = logits.astype(np.float64) / temperature
    mass = np.exp(scaled - scaled.max())
    return mass / mass.sum()


def kept(mass: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """What is left of a distribution when only some tokens are kept."""
    left = np.where(tokens, mass, 0)
    return left / left.sum()


def rank(mass: np.ndarray) -> np.ndarray:
    return np.argsort(np.argsort(-mass, kind="stable"), kind="stable")


def before(mass: np.ndarray) -> np.ndarray:
    """The mass of all tokens likelier than each."""
    order = np.argsort(-mass, kind="stable")
    result = np.zeros(len(mass))
    result[order] = np.cumsum(mass[order]) - mass[order]
    return result


def likely(mass: np.ndarray, share: float) -> np.ndarray:
    return mass >= share * mass.max()


def penalised(logits: np.ndarray) -> np.ndarray:
    lowered = logits - 0.4 * SEEN - 0.3 * (SEEN > 0)
    return np.where(SEEN > 0, np.where(lowered > 0, lowered / 1.5, lowered * 1.5), logits)


def forbidden(logits: np.ndarray) -> np.ndarray:
    return np.where(np.isin(np.arange(VOCABULARY), FORBIDDEN), -np.inf, logits)


def biased(logits: np.ndarray) -> np.ndarray:
    result = logits.copy()
    result[2] += 1.5
    result[6] = -np.inf
    return result


PLAIN, WARM = softmax(LOGITS, 1.0), softmax(LOGITS, 1.7)
CASES = {
    "temperature": (plan_of(columns(DRAWS, 1.7)), WARM),
    "top-k": (plan_of(columns(DRAWS, 1.0, top_k=4)), kept(PLAIN, rank(PLAIN) < 4)),
    "top-p": (plan_of(columns(DRAWS, 1.7, top_p=0.7)), kept(WARM, before(WARM) <= 0.7)),
    "min-p": (plan_of(columns(DRAWS, 1.7, min_p=0.2)), kept(WARM, likely(WARM, 0.2))),
    "all filters": (
        plan_of(columns(DRAWS, 1.7, top_k=9, top_p=0.9, min_p=0.05)),
        kept(WARM, (rank(WARM) < 9) & (before(WARM) <= 0.9) & likely(WARM, 0.05)),
    ),
    "penalties": (
        plan_of(columns(DRAWS, 1.0), penalties=penalised_rows(DRAWS)),
        softmax(penalised(LOGITS), 1.0),
    ),
    "masks": (plan_of(columns(DRAWS, 1.0), **masks(DRAWS)), softmax(forbidden(LOGITS), 1.0)),
    "biases": (plan_of(columns(DRAWS, 1.0), biases=biases(DRAWS)), softmax(biased(LOGITS), 1.0)),
    "everything": (
        plan_of(
            columns(DRAWS, 1.7, top_k=7),
            penalties=penalised_rows(DRAWS),
            biases=biases(DRAWS),
            **masks(DRAWS),
        ),
        kept(
            softmax(biased(forbidden(penalised(LOGITS))), 1.7),
            rank(softmax(biased(forbidden(penalised(LOGITS))), 1.7)) < 7,
        ),
    ),
}


def chi_square_limit(freedom: int, deviations: float = 4.5) -> float:
    """What chi-square exceeds three times in a million, as Wilson and Hilferty approximate it."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + deviations * spread**0.5) ** 3


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_drawn_as_often_as_they_should_be(case: str) -> None:
    plan, probability = CASES[case]
    counts = np.bincount(drawn(plan), minlength=VOCABULARY)
    possible = probability > 0
    assert not counts[~possible].any()
    expected = probability[possible] * DRAWS
    assert expected.min() > 5, "too few draws for this test"
    chi_square = ((counts[possible] - expected) ** 2 / expected).sum()
    assert chi_square < chi_square_limit(int(possible.sum()) - 1)


def test_neighbouring_positions_and_choices_draw_independently() -> None:
    positions = np.arange(DRAWS)
    same_seed = msgspec.structs.replace(columns(DRAWS, 1.7), seed=np.full(DRAWS, 5, np.int64))
    tokens = drawn(plan_of(same_seed), positions)
    counts = np.bincount(tokens, minlength=VOCABULARY)
    chi_square = ((counts - WARM * DRAWS) ** 2 / (WARM * DRAWS)).sum()
    assert chi_square < chi_square_limit(VOCABULARY - 1)
    pairs = np.zeros((VOCABULARY, VOCABULARY))
    np.add.at(pairs, (tokens[:-1], tokens[1:]), 1)
    expected = np.outer(WARM, WARM) * (DRAWS - 1)
    common = expected > 5
    chi_square = ((pairs - expected)[common] ** 2 / expected[common]).sum()
    assert chi_square < chi_square_limit(int(common.sum()))


@pytest.mark.parametrize("seed", range(5))
def test_a_row_draws_the_same_alone_and_in_a_batch(seed: int) -> None:
    """Exactly: seeds, filters and steering of the neighbours are nothing to it."""
    random = np.random.default_rng(seed)
    rows = 40
    sampling = sampling_columns(
        rows,
        temperature=random.choice([0.0, 0.3, 1.0, 2.0], rows),
        top_p=random.choice([0.5, 0.9, 1.0], rows),
        min_p=random.choice([0.0, 0.1], rows),
        top_k=random.choice([0, 1, 3], rows),
        seed=random.integers(-(2**63), 2**63 - 1, rows),
        choice=random.integers(0, 3, rows),
    )
    positions = random.integers(0, 5000, rows)
    steered = np.flatnonzero(random.random(rows) < 0.5)

    def some(index: np.ndarray) -> StepPlan:
        """The plan of some of these rows."""
        number = np.flatnonzero(np.isin(index, steered)).astype(np.int32)
        lowered = penalised_rows(len(number))
        bias = biases(len(number))
        return plan_of(
            sampling.of(index),
            penalties=replace(lowered, rows=number, begun=number) if len(number) else None,
            biases=replace(bias, logits=np.repeat(number, 2)) if len(number) else None,
        )

    together = drawn(some(np.arange(rows)), positions)
    for row in range(rows):
        one = np.array([row])
        assert drawn(some(one), positions[one])[0] == together[row]


def test_what_is_accepted_is_penalised_from_the_next_step_on() -> None:
    sampler = Sampler(OPS)
    plan = plan_of(columns(1, 0.0), penalties=penalised_rows(1, 2.0, 2.0, 1.0))
    for count in range(1, 4):
        logits = torch.zeros(1, VOCABULARY)
        sampler.process_logits(plan, np.arange(1), plan.tokens, logits)
        expected = -2.0 * (SEEN[9] + count - 1) - 2.0 * (count > 1)
        assert logits[0, 9] == expected
        sampler.count(plan, ints(0, 1), ints(9))
        assert plan.part is not None
        assert plan.part.penalties is not None
        counted = replace(plan.part.penalties, begun=ints(), begun_starts=ints(0))
        plan = msgspec.structs.replace(plan, part=SamplingPart(penalties=counted))


def test_rows_left_without_a_token_are_named() -> None:
    plan = plan_of(
        columns(3),
        biases=Biases(
            logits=np.full(VOCABULARY, 1, np.int32),
            token_ids=np.arange(VOCABULARY, dtype=np.int32),
            values=np.full(VOCABULARY, -np.inf, np.float32),
        ),
    )
    logits = torch.zeros(3, VOCABULARY)
    barren = Sampler(OPS).process_logits(plan, np.arange(3), plan.tokens, logits)
    assert barren is not None
    assert barren.tolist() == [False, True, False]


def test_drafts_before_the_logits_of_a_verify_row_count_as_sampled() -> None:
    drafts = ints(9, 4, 9)
    sampling = columns(2, 0.0)
    tokens = np.concatenate([ints(5), drafts, ints(5)])
    penalised = penalised_rows(2, 1.0, 0.5, 1.0)
    fields = {"logit_tokens": np.arange(5, dtype=np.int32), "tokens": tokens}
    plan = step_plan([4, 1], sampling=sampling, penalties=penalised, **fields)
    logits = torch.zeros(5, VOCABULARY)
    Sampler(OPS).process_logits(plan, np.array([0, 0, 0, 0, 1]), tokens, logits)
    for row, known in enumerate([[], drafts[:1], drafts[:2], drafts, []]):
        counts = Counter([*OUTPUTS, *np.array(known).tolist()])
        expected = [-(counts[t] + 0.5 * (counts[t] > 0)) for t in range(VOCABULARY)]
        assert logits[row].tolist() == expected


@pytest.mark.parametrize("peak", [1e4, -1e4])
def test_a_low_temperature_makes_no_infinity_of_a_large_logit(peak: float) -> None:
    logits = torch.full((1, 500), peak - 50.0)
    logits[0, 300] = peak
    one = torch.ones(1)
    drawn = OPS.sample(logits, one.double() / 2, one * 1e-36, torch.tensor([0]), one, one * 0)
    assert drawn.tolist() == [300]


def accepted(
    rows: list[tuple[list[int], list[int]]],
    failed: tuple[int, ...] = (),
    blocked: tuple[int, ...] | None = None,
) -> list[list[int]]:
    """Rows of (tokens, what was sampled after the last len(sampled) of them)."""
    tokens = np.array([token for row, _ in rows for token in row], np.int32)
    ends = np.cumsum([len(row) for row, _ in rows])
    wanted = [
        np.arange(end - len(sampled), end) for end, (_, sampled) in zip(ends, rows, strict=True)
    ]
    starts, ids = accept(
        tokens,
        np.concatenate(wanted).astype(np.int32),
        np.repeat(np.arange(len(rows)), [len(sampled) for _, sampled in rows]),
        np.array([token for _, sampled in rows for token in sampled], np.int32),
        len(rows),
        np.isin(np.arange(len(rows)), failed) if failed else None,
        None if blocked is None else np.isin(np.arange(sum(map(len, wanted))), blocked),
    )
    return [ids[a:b].tolist() for a, b in pairwise(starts)]


def test_a_decode_row_accepts_its_one_token() -> None:
    assert accepted([([7], [3]), ([3], [9])]) == [[3], [9]]


def test_a_chunk_without_logits_accepts_nothing() -> None:
    assert accepted([([7, 8, 9], []), ([3], [9])]) == [[], [9]]


@pytest.mark.parametrize("right", range(4))
def test_a_draft_is_accepted_up_to_its_first_mistake(right: int) -> None:
    sampled = [11, 12, 13, 14]
    draft = [s if i < right else 99 for i, s in enumerate(sampled[:3])]
    rows = [([5], [6]), ([10, *draft], sampled), ([12], [13])]
    assert accepted(rows) == [[6], sampled[: right + 1], [13]]


def test_a_draft_that_is_right_again_after_a_mistake_stays_refused() -> None:
    assert accepted([([10, 99, 12, 13], [11, 12, 13, 14])]) == [[11]]


def test_a_failed_row_accepts_nothing_and_costs_no_other() -> None:
    rows = [([10, 11], [11, 12]), ([1], [2]), ([3, 4], [4, 5])]
    assert accepted(rows, failed=(1,)) == [[11, 12], [], [4, 5]]


@pytest.mark.parametrize("blocked", range(1, 5))
def test_a_row_accepts_what_comes_before_logits_without_a_token(blocked: int) -> None:
    """The first logits are those of another row."""
    rows = [([5], [6]), ([10, 11, 12, 13], [11, 12, 13, 14]), ([12], [13])]
    kept = [11, 12, 13, 14][: blocked - 1]
    assert accepted(rows, blocked=(blocked,)) == [[6], kept, [13]]


def test_logits_without_a_token_after_a_wrong_draft_cost_nothing() -> None:
    rows = [([10, 99, 12], [11, 12, 13]), ([1], [2])]
    assert accepted(rows, blocked=(1, 2)) == [[11], [2]]


def test_a_row_whose_first_logits_have_no_token_accepts_nothing() -> None:
    rows = [([10, 11], [11, 12]), ([1], [2])]
    assert accepted(rows, blocked=(0,)) == [[], [2]]
    assert accepted(rows, blocked=(2,)) == [[11, 12], []]
    assert accepted(rows, failed=(0,), blocked=(2,)) == [[], []]


SLOTS, TOKENS = 20, 9
SLOT = st.integers(0, SLOTS - 1)
TOKEN = st.integers(0, TOKENS - 1)
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
        if not naive:
            continue
        slots = np.array(list(naive), np.int32)
        logits = torch.zeros(len(slots), TOKENS)
        count = len(slots)
        plan = plan_of(columns(count), slot=slots)
        drawn.apply(OPS, logits, np.arange(count), plan.tokens, plan, by_count({}, count))
        expected = [[-naive[slot][token] for token in range(TOKENS)] for slot in naive]
        assert logits.tolist() == [[0.0 + count for count in row] for row in expected]


def test_many_different_tokens_find_room() -> None:
    drawn = TokenCounts()
    ids = list(range(500))
    drawn.begin(by_count({3: ids[:70]}, 1))
    for token in ids[70:]:
        drawn.count(np.array([3], np.int32), np.array([token], np.int32))
    logits = torch.zeros(1, 600)
    plan = plan_of(columns(1), slot=ints(3))
    drawn.apply(OPS, logits, np.arange(1), plan.tokens, plan, by_count({}, 1))
    assert logits[0].tolist() == [-1.0] * 500 + [0.0] * 100
