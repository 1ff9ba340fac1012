"""How many drafts a request gets: those that pay, that fit, and that its grammar allows."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.model_worker.steps import Steps

from antiphon.model_worker.batching.faults import RequestFault
from antiphon.model_worker.speculation.policy import (
    ACCEPTANCE_START,
    Speculation,
    StepCosts,
)
from antiphon.wire.sampling import ThinkingBudget

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.model_worker.batching.plan import Ints
    from antiphon.model_worker.batching.request import Request
    from antiphon.model_worker.batching.rows import StepRows

DRAFTS_MAX = 4
FREE = StepCosts((1, 2), (1.0, 1.0))
"""A step takes as long, however many tokens it has."""
FAIR = StepCosts((1, 2), (1.0, 2.0))
"""A token costs as much as the first one: a draft would have to be certain."""


class FixedDrafts:
    """Drafts of the same length for every request."""

    def __init__(self, length: int) -> None:
        self._length = length

    def propose(self, request: Request, drafts_max: int) -> Ints:
        return np.zeros(min(self._length, drafts_max), np.int32)

    def ended(self, request: Request) -> None:
        pass


class Endless(FixedDrafts):
    """Drafts as many as it may, and remembers who asked and who ended."""

    def __init__(self, length: int = 100) -> None:
        super().__init__(length)
        self.asked: list[tuple[int, int]] = []
        self.gone: list[int] = []

    def propose(self, request: Request, drafts_max: int) -> Ints:
        self.asked.append((request.key, drafts_max))
        return super().propose(request, drafts_max)

    def ended(self, request: Request) -> None:
        self.gone.append(request.key)


class Faulty(FixedDrafts):
    """Fails for one request."""

    def propose(self, request: Request, drafts_max: int) -> Ints:
        if request.key == 1:
            raise ZeroDivisionError
        return super().propose(request, drafts_max)


def policy(costs: StepCosts | None = None, slots: int = 4) -> Speculation:
    return Speculation(Endless(), DRAFTS_MAX, slots, costs)


def drafting(costs: StepCosts | None = None, **sizes: Any) -> tuple[Steps, Speculation]:
    speculation = policy(costs)
    return Steps(**{"pages": 40, **sizes}, speculation=speculation), speculation


def draft_lengths(rows: StepRows) -> list[int]:
    return [len(drafts) for drafts in rows.drafts]


def verify(steps: Steps, right: int) -> list[int]:
    """A step in which so many drafts of each row are right; how many each had."""
    rows = steps.next()
    lengths = [*[0] * rows.decodes, *draft_lengths(rows)]
    accepted = [[1] * (1 + min(right, length)) for length in lengths]
    accepted += [[1] if draws else [] for draws in rows.draws[rows.verified :].tolist()]
    steps.commit(rows, *accepted)
    return draft_lengths(rows)


# Costs.


def test_costs_are_those_that_were_measured_and_lines_between_and_beyond_them() -> None:
    costs = StepCosts((1, 2, 4, 8), (1.0, 1.5, 2.0, 4.0))
    for tokens, seconds in zip(costs.tokens, costs.seconds, strict=True):
        assert costs.of(tokens) == pytest.approx(seconds)
    assert costs.of(3) == pytest.approx(1.75)
    assert costs.of(6) == pytest.approx(3.0)
    assert costs.of(9) == pytest.approx(4.5)
    assert costs.of(100) == pytest.approx(4.0 + 92 * 0.5)


@given(
    st.dictionaries(st.integers(2, 60), st.floats(0, 1), min_size=1, max_size=6),
    st.integers(1, 100),
)
def test_more_tokens_never_cost_less(slopes: dict[int, float], tokens: int) -> None:
    measured = [1, *sorted(slopes)]
    seconds = np.cumsum([1.0, *(slopes[at] for at in measured[1:])]).tolist()
    costs = StepCosts(tuple(measured), tuple(seconds))
    assert costs.of(tokens) <= costs.of(tokens + 1) + 1e-9
    assert costs.of(tokens) >= 1.0 - 1e-9


# How many drafts pay.


def lengths(speculation: Speculation, rates: Sequence[float], rows: int, budget: int) -> list[int]:
    speculation._acceptance[: len(rates)] = rates
    return speculation._lengths(range(len(rates)), rows, budget)


def test_every_request_gets_all_drafts_where_these_cost_nothing() -> None:
    assert lengths(policy(FREE), [0.1, 0.9], 2, 100) == [DRAFTS_MAX, DRAFTS_MAX]


def test_no_request_gets_a_draft_where_these_do_not_pay() -> None:
    assert lengths(policy(FAIR), [0.7, 0.99], 2, 100) == [0, 0]


def test_the_likeliest_drafts_come_first() -> None:
    speculation = policy(FREE)
    assert lengths(speculation, [0.5, 0.9, 0.2], 3, 1) == [0, 1, 0]
    # Nine tenths, then 0.81, 0.729 and 0.6561, before a half.
    assert lengths(speculation, [0.5, 0.9, 0.2], 3, 4) == [0, 4, 0]
    assert lengths(speculation, [0.5, 0.9, 0.2], 3, 6) == [2, 4, 0]
    assert lengths(speculation, [0.5, 0.9, 0.2], 3, 7) in ([3, 4, 0], [2, 4, 1])


@pytest.mark.parametrize("costs", [None, FREE])
@pytest.mark.parametrize("budget", [0, 1, 5, 11, 12, 50])
def test_drafts_stay_within_what_is_left_of_a_step(costs: StepCosts | None, budget: int) -> None:
    given = lengths(policy(costs), [0.7, 0.7, 0.7], 3, budget)
    assert sum(given) <= budget
    assert max(given) <= DRAFTS_MAX
    assert (sum(given) == 12) == (budget >= 12)


@given(
    rates=st.lists(st.floats(0.05, 0.95), min_size=1, max_size=3),
    others=st.integers(0, 3),
    slopes=st.lists(st.floats(0.01, 0.6), min_size=3, max_size=3).map(sorted),
)
def test_no_other_lengths_yield_more_tokens_a_second(
    rates: list[float], others: int, slopes: list[float]
) -> None:
    """Where each further token costs more than the one before it."""
    costs = StepCosts((1, 3, 6, 9), tuple(np.cumsum([1.0, *slopes]).tolist()))
    slopes_each = np.diff([costs.of(tokens) for tokens in range(1, 20)])
    if (np.diff(slopes_each) < -1e-12).any():
        return  # the distances differ, so some step may be cheaper than the one before
    speculation = Speculation(Endless(), 2, 3, costs)
    rows = len(rates) + others

    def rate(drafts: Sequence[int]) -> float:
        more = sum(
            likelihood**n
            for likelihood, count in zip(rates, drafts, strict=True)
            for n in range(1, count + 1)
        )
        return (rows + more) / costs.of(rows + sum(drafts))

    chosen = rate(lengths(speculation, rates, rows, 100))
    best = max(rate(drafts) for drafts in product(range(3), repeat=len(rates)))
    assert chosen == pytest.approx(best)


def test_few_requests_get_drafts_and_many_get_none() -> None:
    """Once a step is bound by arithmetic, each token costs as much as another."""
    costs = StepCosts((1, 8, 16), (1.0, 1.1, 2.2))
    assert lengths(policy(costs), [0.8], 1, 100) == [DRAFTS_MAX]
    assert sum(lengths(policy(costs), [0.8] * 4, 12, 100)) == 0


# What was right and what was not.


def test_right_drafts_raise_the_acceptance_and_wrong_ones_lower_it() -> None:
    speculation = policy()
    before = ACCEPTANCE_START
    for _ in range(30):
        speculation.verified(0, drafted=4, right=4)
        speculation.verified(1, drafted=4, right=0)
        assert speculation._acceptance[0] > before
        before = speculation._acceptance[0]
    assert speculation._acceptance[0] == pytest.approx(1.0, abs=0.01)
    assert speculation._acceptance[1] == pytest.approx(0.0, abs=0.01)
    assert speculation._acceptance[2] == ACCEPTANCE_START
    assert (speculation.counts.rows, speculation.counts.proposed) == (60, 240)
    assert speculation.counts.accepted == 120


def test_what_follows_a_wrong_draft_says_nothing() -> None:
    short, long = policy(), policy()
    short.verified(0, drafted=2, right=1)
    long.verified(0, drafted=4, right=1)
    assert short._acceptance[0] == long._acceptance[0]


def test_acceptance_is_the_share_of_right_drafts_in_the_long_run() -> None:
    dice, speculation = np.random.default_rng(0), policy()
    seen: list[float] = []
    for _ in range(4000):
        right = int(np.cumprod(dice.random(4) < 0.6).sum())
        speculation.verified(0, drafted=4, right=right)
        seen.append(speculation._acceptance.item(0))
    assert np.mean(seen[100:]) == pytest.approx(0.6, abs=0.06)


def test_who_gets_no_drafts_gets_some_again_after_a_while() -> None:
    costs = StepCosts((1, 2, 3), (1.0, 1.4, 1.8))
    steps, speculation = drafting(costs, pages=120, context_tokens=400)
    steps.add(0, max_new_tokens=380, ignore_eos=True)
    verify(steps, 0)
    assert verify(steps, 0) != []
    while verify(steps, 0):
        pass
    assert speculation._acceptance[0] < 0.4
    waited = 1
    while not verify(steps, 0):
        waited += 1
    assert 1 < waited < 200


def test_a_request_begins_with_an_acceptance_of_its_own() -> None:
    steps, speculation = drafting(running_max=1)
    steps.add(0, max_new_tokens=12, ignore_eos=True)
    while not steps.batching.idle:
        verify(steps, 0)
    assert speculation._acceptance[0] < ACCEPTANCE_START / 2
    steps.add(1)
    steps.next()
    assert speculation._acceptance[0] == ACCEPTANCE_START


# What fits.


def test_drafts_end_before_the_last_token() -> None:
    """The row of the last draft samples the token after it, too."""
    for limit in range(1, 12):
        steps, _ = drafting()
        steps.add(0, max_new_tokens=limit, ignore_eos=True)
        verify(steps, 0)
        left = limit - 1
        while left:
            (length,) = verify(steps, 4) or [0]
            assert length == min(DRAFTS_MAX, left - 1)
            left -= 1 + length
        assert steps.batching.idle


@pytest.mark.parametrize("prompt", range(1, 20))
def test_drafts_stop_where_a_state_is_due(prompt: int) -> None:
    steps, _ = drafting(cached=True, states=12, checkpoint_tokens=8, chunk_tokens=None)
    steps.add(0, prompt, max_new_tokens=20, ignore_eos=True)
    passed: list[int] = []
    while not steps.batching.idle:
        rows = steps.next()
        if steps.batching.running and rows.verified:
            passed += [int(rows.starts[0]), int(rows.ends[0])]
            between = range(int(rows.starts[0]) + 1, int(rows.ends[0]))
            assert not any(end % 8 == 0 for end in between), "a state was passed"
        accepted = [[1] * (1 + length) for length in draft_lengths(rows)]
        accepted += [[1]] * rows.decodes
        accepted += [[1] if draws else [] for draws in rows.draws[rows.verified :].tolist()]
        steps.commit(rows, *accepted)
    assert any(end % 8 == 0 for end in passed)


def test_drafts_take_only_pages_that_are_free() -> None:
    steps, _ = drafting(pages=10)
    steps.add(0, 7, max_new_tokens=6, ignore_eos=True)
    steps.add(1, 6, max_new_tokens=6, ignore_eos=True)
    verify(steps, 0)
    (pool,) = steps.pools.pools
    taken = pool.allocate(pool.free_count - 1)
    rows = steps.next()
    assert (rows.decodes, draft_lengths(rows)) == (1, [DRAFTS_MAX])
    steps.commit(rows, [1], [1])
    assert steps.batching.planner.retractions == 0
    pool.release(taken)
    assert verify(steps, 0) == [3, 3]


def test_drafts_within_the_last_page_need_no_other() -> None:
    steps = Steps(pages=2, speculation=Speculation(Endless(), 2, 4), context_tokens=8)
    steps.add(0, 5, max_new_tokens=3, ignore_eos=True)
    verify(steps, 0)
    assert steps.pools.free() == [0]
    assert draft_lengths(steps.next()) == [1]


def test_pages_of_wrong_drafts_are_free_again() -> None:
    steps, _ = drafting()
    steps.add(0, 7, max_new_tokens=20, ignore_eos=True)
    verify(steps, 0)
    for _ in range(8):
        rows = steps.next()
        assert draft_lengths(rows) == [DRAFTS_MAX]
        steps.commit(rows, [1])
        (request,) = steps.batching.running.values()
        assert steps.pools.used() == [-(-request.length // 4)]


def test_only_requests_whose_tokens_are_known_get_drafts() -> None:
    steps, speculation = drafting()
    steps.add(0, max_new_tokens=20, ignore_eos=True)
    first = steps.next()
    assert len(steps.next()) == 0, "drafts are likely, but the first token is not known"
    steps.commit(first, [1])
    rows = steps.next()
    assert rows.drafts
    assert len(steps.next()) == 0, "what a row accepts was taken for known"
    steps.commit(rows, [1, 1])
    assert speculation.counts.accepted == 1
    assert steps.next().drafts


def test_prompts_get_the_tokens_of_requests_that_wait_for_drafts() -> None:
    steps, _ = drafting(step_tokens_max=4, running_max=2)
    steps.add(0, prompt=3, max_new_tokens=20, ignore_eos=True)
    first = steps.next()
    steps.add(1, prompt=20)
    assert steps.lengths(steps.next()) == [(1, 4)], "the request in flight takes a token"
    steps.commit(first, [1])
    assert steps.lengths(steps.next())[-1] == (1, 3)


def test_requests_without_likely_drafts_are_launched_ahead() -> None:
    steps, speculation = drafting()
    speculation.drafter = FixedDrafts(1)  # which stands for the token in flight
    steps.add(0, max_new_tokens=20, ignore_eos=True)
    steps.next()
    second = steps.next()
    assert len(second) == 1
    assert not second.drafts


def test_a_request_with_a_thinking_budget_gets_none() -> None:
    steps, _ = drafting()
    budget = ThinkingBudget(tokens_max=3, begin_id=50, closing_ids=(60,))
    steps.add(0, max_new_tokens=20, processors=(budget,))
    verify(steps, 0)
    assert verify(steps, 0) == []


def test_a_drafter_that_fails_names_the_request() -> None:
    steps = Steps(pages=40, speculation=Speculation(Faulty(3), DRAFTS_MAX, 4))
    steps.add(0, max_new_tokens=20)
    steps.add(1, max_new_tokens=20)
    verify(steps, 0)
    with pytest.raises(RequestFault) as caught:
        steps.next()
    assert caught.value.request.key == 1


def test_the_drafter_is_asked_for_what_fits_and_told_of_each_end() -> None:
    steps, speculation = drafting()
    assert isinstance(speculation.drafter, Endless)
    steps.add(0, max_new_tokens=4, ignore_eos=True)
    steps.add(1, max_new_tokens=40, ignore_eos=True)
    verify(steps, 0)
    verify(steps, 2)
    assert speculation.drafter.asked == [(0, 2), (1, 4)]
    assert speculation.drafter.gone == [0]
    steps.drop(1)
    assert speculation.drafter.gone == [0, 1]


def test_a_retracted_request_is_not_forgotten_by_its_drafter() -> None:
    steps, speculation = drafting()
    assert isinstance(speculation.drafter, Endless)
    steps.add(0, max_new_tokens=20, ignore_eos=True)
    verify(steps, 0)
    (request,) = steps.batching.running.values()
    steps.batching.planner.retract(request)
    assert speculation.drafter.gone == []
    verify(steps, 0)
    assert verify(steps, 4) == [4]
