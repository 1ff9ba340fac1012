"""Which requests are rejected, which wait and which are retracted."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.reports import new_ids
from tests.support.worker import error_of, limits, state
from tests.unit.model_worker.steps import LIMITS, Steps, spans

from antiphon.model_worker.batching.admission import check, outputs_max
from antiphon.model_worker.batching.page_budget import NewTokenRatio, fits_exactly
from antiphon.model_worker.batching.plan import PLAIN, future
from antiphon.model_worker.batching.plan_builder import build_plan
from antiphon.model_worker.batching.state import Finish
from antiphon.wire.base import FinishReason
from antiphon.wire.codec import pack_ids
from antiphon.wire.errors import EngineError, InvalidRequest, PromptTooLong, Unsupported
from antiphon.wire.sampling import (
    AllowRange,
    DisallowTokens,
    LogitBias,
    ThinkingBudget,
    TokenOutputParams,
)
from antiphon.wire.token_outputs import pack_floats

if TYPE_CHECKING:
    from antiphon.model_worker.batching.state import Progress

VOCABULARY = LIMITS.vocab_size
INFINITE = float("inf")


def bias(*values: tuple[int, float]) -> LogitBias:
    return LogitBias(
        token_ids=pack_ids([token for token, _ in values]),
        values=pack_floats([value for _, value in values]),
    )


CUT_BIASES = (
    LogitBias(token_ids=pack_ids([1, 2]), values=b"1234"),
    LogitBias(token_ids=b"123", values=b"123"),
)
THINKING = ThinkingBudget(tokens_max=1, begin_id=1, closing_ids=(1, VOCABULARY))


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"prompt_ids": b""}, InvalidRequest, "input_ids"),
        ({"prompt_ids": b"abc"}, InvalidRequest, "input_ids"),
        ({"prompt_ids": pack_ids([VOCABULARY])}, InvalidRequest, "input_ids"),
        ({"prompt_ids": pack_ids([-1])}, InvalidRequest, "input_ids"),
        ({"prompt_ids": pack_ids([1] * 40)}, PromptTooLong, None),
        ({"logit_bias": bias((VOCABULARY, 1.0))}, InvalidRequest, "logit_bias"),
        ({"logit_bias": bias((-1, 1.0))}, InvalidRequest, "logit_bias"),
        ({"logit_bias": bias((4, 1.0), (4, 2.0))}, InvalidRequest, "logit_bias"),
        ({"logit_bias": bias((4, INFINITE))}, InvalidRequest, "logit_bias"),
        ({"logit_bias": bias((4, INFINITE - INFINITE))}, InvalidRequest, "logit_bias"),
        *(({"logit_bias": each}, InvalidRequest, "logit_bias") for each in CUT_BIASES),
        (
            {"processors": (DisallowTokens(token_ids=(VOCABULARY,)),)},
            InvalidRequest,
            "processors",
        ),
        ({"processors": (AllowRange(first=VOCABULARY, last=199),)}, InvalidRequest, "processors"),
        ({"processors": (THINKING,)}, InvalidRequest, "processors"),
        ({"stop_token_ids": (VOCABULARY,)}, InvalidRequest, "stop_token_ids"),
        (
            {"details": TokenOutputParams(named_ids=(VOCABULARY,))},
            InvalidRequest,
            "details.named_ids",
        ),
    ],
)
def test_request_that_can_never_run_is_rejected(
    fields: dict[str, Any], error: type[EngineError], param: str | None
) -> None:
    with pytest.raises(error) as refused:
        check(state(**fields), LIMITS)
    assert (type(refused.value), refused.value.param) == (error, param)


def test_request_at_the_limits_is_admitted() -> None:
    fields: dict[str, Any] = {
        "logit_bias": bias((0, -100.0), (VOCABULARY - 1, 5.0)),
        "processors": (
            DisallowTokens(token_ids=(0, VOCABULARY - 1)),
            AllowRange(first=VOCABULARY - 1, last=10 * VOCABULARY),
            ThinkingBudget(tokens_max=0, begin_id=4, closing_ids=(5,)),
        ),
        "stop_token_ids": (0, VOCABULARY - 1),
        "details": TokenOutputParams(
            logprobs=True, top=VOCABULARY + 1, named_ids=(VOCABULARY - 1,)
        ),
    }
    check(state(**fields), LIMITS)


def test_hidden_states_are_given_only_where_the_operator_allows_it() -> None:
    asking = state(details=TokenOutputParams(hidden=True))
    with pytest.raises(Unsupported, match=r"batching\.hidden_states"):
        check(asking, LIMITS)
    check(asking, limits(hidden_states=True))


def test_prompt_that_fills_the_context_may_request_no_tokens() -> None:
    check(state(40, max_new_tokens=0), LIMITS)


def test_output_is_limited_to_the_context() -> None:
    assert outputs_max(state(30, max_new_tokens=1000), LIMITS) == 10


def test_request_for_no_tokens_is_prefilled_and_samples_nothing() -> None:
    steps = Steps(cached=True)
    steps.add(1, 12, max_new_tokens=0)
    progress = steps.progress()
    for start, end in ((0, 8), (8, 12)):
        assert progress == ()
        rows = steps.next()
        assert spans(rows) == [(start, end, False)]
        progress = steps.commit(rows, [])
    ((finish, token_ids),) = [(each.finish, new_ids(each)) for each in progress]
    assert (finish, token_ids) == (Finish(reason=FinishReason.LENGTH), [])
    assert steps.batching.idle
    assert steps.batching.index.evictable() == [3]


def test_request_for_no_tokens_reserves_no_growth() -> None:
    steps = Steps(pages=10)
    for key in range(3):
        steps.add(key, 12, max_new_tokens=0)
    assert steps.lengths(steps.next()) == [(0, 8), (1, 8)]
    assert steps.batching.capacity().pages_reserved == 2 * 3 - 4


def test_reclaimable_pages_exclude_those_a_window_released() -> None:
    steps = Steps(pages=20, window=4, context_tokens=80)
    steps.add(1, 32, max_new_tokens=8, ignore_eos=True)
    while not steps.batching.running or steps.batching.running[0].prefilling:
        steps.go()
    room, (request,) = steps.batching.batch.page_budget, steps.batching.running.values()
    held = [
        gain - coming
        for gain, coming in zip(room.reclaimable()(request), room.reserved(), strict=True)
    ]
    assert held == steps.pools.used() == [8, 1]
    window = steps.batching.capacity().window
    assert window is not None
    assert (window.total - window.free, window.used + window.evictable) == (1, 1)


@pytest.mark.parametrize(
    ("sampling", "said", "matched"),
    [
        ({}, [5], 9),
        ({"stop_token_ids": (5,)}, [], 5),
        ({"ignore_eos": True, "stop_token_ids": (5,)}, [5, 9, 7], None),
        ({"max_new_tokens": 2, "ignore_eos": True}, [5, 9], None),
    ],
)
def test_choice_finishes_at_its_stop_token_or_its_length(
    sampling: dict[str, Any], said: list[int], matched: int | None
) -> None:
    steps = Steps()
    steps.add(1, **sampling)
    progress: list[Progress] = []
    for token in (5, 9, 7):
        if not steps.batching.idle:
            progress += steps.run([token])
    assert [token for each in progress for token in new_ids(each)] == said
    finish = progress[-1].finish
    assert (finish.matched_stop if finish else None) == matched
    assert (finish is not None) == steps.batching.idle


def test_long_prompt_is_prefilled_in_chunks_beside_decodes() -> None:
    steps = Steps()
    steps.add(1)
    steps.run([5])
    steps.add(2, 20)
    steps.run([5], [])
    rows = steps.next()
    assert spans(rows) == [(4, 5, True), (8, 16, False)]
    plan = build_plan(1, rows, steps.batching.batch, PLAIN)
    assert plan.kv_len.tolist() == [5, 16]
    assert plan.logit_tokens.tolist() == [0]
    assert plan.tokens.tolist() == [5, *range(18, 26)]


def test_request_that_does_not_fit_waits() -> None:
    steps = Steps(pages=10)
    steps.add(1, 16, max_new_tokens=16, ignore_eos=True)
    steps.add(2, 20, max_new_tokens=16, ignore_eos=True)
    steps.add(3, 1)
    assert steps.lengths(steps.next()) == [(1, 8)]
    assert len(steps.batching.waiting) == 2, "a small one passed a large one"
    steps.drop(1)
    assert steps.lengths(steps.next()) == [(2, 8)]


def test_only_a_share_of_the_remaining_output_is_reserved() -> None:
    for ignore_eos, running in ((False, [1, 2]), (True, [1])):
        steps = Steps(pages=10)
        for key in (1, 2):  # 2 pages, and 3 of the 4 that it may take yet
            steps.add(key, 8, max_new_tokens=16, ignore_eos=ignore_eos)
        steps.go()
        assert steps.running() == running


def test_new_token_ratio_decays_and_jumps_at_a_retraction() -> None:
    ratio = NewTokenRatio(1.0)
    assert ratio.value == 0.7
    for _ in range(300):
        ratio.decay()
    assert ratio.value == pytest.approx((0.7 + 0.14 * 0.7) / 2)
    for _ in range(400):
        ratio.decay()
    assert ratio.value == pytest.approx(0.14 * 0.7)
    steps = Steps(pages=10)
    steps.add(1, 8, max_new_tokens=30)
    steps.go()
    ratio.retracted(steps.batching.running.values())
    assert ratio.value == pytest.approx((1 + 20) / (30 + 1))
    ratio.reset()
    assert ratio.value == 0.7
    assert NewTokenRatio(3.0).value == 1.0


def test_youngest_request_is_retracted_and_keeps_tokens_and_position() -> None:
    steps = Steps(pages=10, conservativeness=0.0)
    steps.add(1, 15, max_new_tokens=25)
    steps.add(2, 15, max_new_tokens=25)
    steps.until_retraction()
    assert steps.running() == [1]
    batching = steps.batching
    assert batching.planner.retracted_prompt_tokens == 15
    assert 15 < batching.planner.retracted_tokens < 15 + 25
    (running,) = batching.running.values()
    assert batching.capacity().sequence_tokens == running.length
    waiting = steps.batching.waiting.first()
    assert waiting is not None
    assert (waiting.key, waiting.outputs_count > 3, waiting.table) == (2, True, None)
    steps.add(3)
    assert steps.batching.waiting.first() is waiting


def test_retracted_request_finds_its_own_pages_in_the_cache() -> None:
    steps = Steps(pages=10, conservativeness=0.0, cached=True)
    steps.add(1, range(15), max_new_tokens=25)
    steps.add(2, range(50, 65), max_new_tokens=25)
    steps.until_retraction()
    steps.drop(1)
    ((key, length),) = steps.go()
    assert key == 2
    assert length < 10, "it was computed anew"


def test_retracted_request_is_not_rejected_by_a_full_queue() -> None:
    steps = Steps(pages=10, conservativeness=0.0, queue_max=1, running_max=2)
    steps.add(1, 15, max_new_tokens=25)
    steps.add(2, 15, max_new_tokens=25)
    steps.go()
    steps.add(3)
    steps.until_retraction()
    assert len(steps.batching.waiting) == 2
    assert steps.progress()[-1].finish is None
    steps.add(4)
    (progress,) = steps.progress()
    assert (progress.key, progress.finish is not None) == (4, True)


def test_full_queue_rejects_with_retry_after() -> None:
    steps = Steps(queue_max=2, running_max=1)
    for key in range(4):
        steps.add(key)
    (progress,) = steps.progress()
    assert progress.key == 3
    error = error_of(progress.finish)
    assert (error.code, error.retry_after_s) == ("overloaded", 1.0)


@pytest.mark.parametrize(
    ("limits", "ends"),
    [
        ({"queue_timeout_s": 3.0}, {2: "overloaded"}),
        ({"running_timeout_s": 3.0}, {1: "deadline"}),
        ({}, {}),
    ],
)
def test_request_waits_and_runs_for_no_longer_than_allowed(
    limits: dict[str, Any], ends: dict[int, str]
) -> None:
    steps = Steps(running_max=1, **limits)
    steps.add(1, max_new_tokens=20)
    steps.add(2, max_new_tokens=20)
    for _ in range(4):
        steps.go()
    finished = [(p.key, p.finish) for p in steps.progress() if p.finish]
    assert {key: finish.error.code for key, finish in finished if finish.error} == ends


def test_queue_timeout_counts_time_waited_elsewhere() -> None:
    steps = Steps(running_max=1, queue_timeout_s=9.0)
    steps.add(1, max_new_tokens=30)
    steps.add(2)
    steps.add(3, waited_ms=8_000)
    steps.add(4, waited_ms=4_000)
    ended: list[list[int]] = []
    for _ in range(9):
        steps.go()
        ended.append([p.key for p in steps.progress() if p.finish])
    assert ended == [[3], [], [], [], [4], [], [], [], [2]]


def test_timeouts_forget_ended_requests() -> None:
    steps = Steps(running_max=2, queue_max=50, queue_timeout_s=1e6, running_timeout_s=1e6)
    for key in range(20):
        steps.add(key)
    steps.go()
    steps.drop(15)  # one that waits, and one that runs
    held = [
        weakref.ref(r) for r in (*steps.batching.running.values(), steps.batching.waiting.last())
    ]
    steps.drain()
    steps.progress()
    steps.batching.planner.take_started()
    gc.collect()
    assert [ref() for ref in held] == [None] * 3


def test_stream_interval_reports_first_and_last_tokens_at_once() -> None:
    steps = Steps(stream_interval=3)
    steps.add(1, max_new_tokens=6)
    reported = [steps.run([token]) for token in range(20, 26)]
    ids = [[new_ids(p) for p in progress] for progress in reported]
    assert ids == [[[20]], [], [], [[21, 22, 23]], [], [[24, 25]]]


def test_next_step_may_be_planned_before_the_last_outcome() -> None:
    steps = Steps()
    steps.add(1, max_new_tokens=3)
    steps.add(2, max_new_tokens=1)
    first = steps.next()
    second = steps.next()
    assert (steps.lengths(second), spans(second)) == ([(1, 1)], [(3, 4, True)])
    plan = build_plan(2, second, steps.batching.batch, PLAIN)
    assert plan.tokens.tolist() == [future(first.slots.slots.item(0))]
    steps.commit(first, [5], [6])
    third = steps.next()
    (progress,) = steps.commit(second, [7])
    assert new_ids(progress) == [7]
    (progress,) = steps.commit(third, [8])
    assert new_ids(progress) == [8]
    assert progress.finish is not None
    assert steps.batching.idle


def test_rows_of_a_discarded_plan_are_launched_again() -> None:
    steps = Steps()
    steps.add(1, max_new_tokens=5)
    first, second = steps.next(), steps.next()
    steps.commit(first, [6])
    steps.batching.discard_launched(second)
    assert not steps.batching.batch.is_current(second).any()
    assert spans(steps.next()) == [(3, 4, True)]


def test_request_of_known_length_is_not_run_beyond_its_end() -> None:
    steps = Steps()
    steps.add(1, max_new_tokens=1)
    rows = steps.next()
    assert not len(steps.next())
    steps.commit(rows, [5])
    assert steps.batching.idle


@given(
    lengths=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60)), min_size=1, max_size=8),
    page_tokens=st.sampled_from([1, 4, 16]),
    spare=st.integers(0, 40),
)
def test_fits_exactly_never_runs_out_of_pages(
    lengths: list[tuple[int, int]], page_tokens: int, spare: int
) -> None:
    """Played through step by step, with every page counted."""
    held = [-(-length // page_tokens) for length, _ in lengths]
    columns = np.array([*zip(*lengths, strict=True)], np.int64)
    fits = fits_exactly(columns[0], columns[1], np.array(held), page_tokens, spare)
    free, peak = spare + sum(held), 0
    for step in range(max(left for _, left in lengths) + 1):
        living = [(length + step) for length, left in lengths if left >= step]
        peak = max(peak, sum(-(-length // page_tokens) for length in living))
    if fits:
        assert peak <= free
    if peak + len(lengths) <= free:
        assert fits


def test_requests_of_known_length_share_freed_pages() -> None:
    """Together they would need 15 pages at their ends, but never more than 10 at once."""
    steps = Steps(pages=10, running_max=3)
    for key, answer in enumerate((4, 12, 24)):
        steps.add(key, 4, max_new_tokens=answer, ignore_eos=True)
    steps.go()
    assert steps.running() == [0, 1, 2]
    steps.drain()
    assert steps.batching.planner.retractions == 0


def test_choice_is_dropped_in_any_phase() -> None:
    steps = Steps(running_max=1, cached=True)
    steps.add(1, 20)
    steps.add(2)
    rows = steps.next()  # the first is in the middle of its prompt
    steps.drop(1)
    steps.drop(2)
    assert steps.commit(rows, []) == ()
    assert steps.batching.idle
    steps.batching.flush()
    assert steps.pools.used() == [0]


def test_choice_is_dropped_before_the_progress_of_its_last_step_is_taken() -> None:
    steps = Steps()
    for key in (1, 2):
        steps.add(key)
    for _ in range(3):
        steps.go()
    steps.drop(1)
    steps.add(3)
    steps.go()
    found = [(news.key, news.start, news.end) for news in steps.progress() if news.key != 1]
    assert found == [(2, 0, 1), (2, 1, 2), (2, 2, 3), (3, 0, 1), (2, 3, 4)]


@pytest.mark.parametrize(("kept", "found"), [(None, 4), (0, 4), (3, 4), (4, 8), (99, 16)])
def test_only_kept_outputs_of_a_stopped_request_are_cached(kept: int | None, found: int) -> None:
    steps = Steps(cached=True)
    steps.add(1, [5] * 4, max_new_tokens=30)
    for _ in range(14):
        steps.go(token=7)
    steps.drop(1, kept)
    assert steps.cached_tokens([5] * 4 + [7] * 30) == found
    assert steps.batching.idle


def test_choice_that_never_ran_leaves_nothing_behind() -> None:
    steps = Steps(running_max=1, cached=True)
    steps.add(1)
    steps.add(2, [5] * 8)
    steps.go()
    steps.drop(2, kept=0)
    assert steps.cached_tokens([5] * 9) == 0
