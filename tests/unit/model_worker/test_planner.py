"""What one step takes, and the order of requests."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.worker import error_of
from tests.unit.model_worker.steps import LIMITS, PAGE_TOKENS, Steps, outcome

from antiphon.config.worker import Policy
from antiphon.model_worker.batching import prefixes
from antiphon.model_worker.batching.plan import PLAIN, LogprobsBatch
from antiphon.model_worker.batching.plan_builder import build_plan
from antiphon.model_worker.batching.planner import TokenBudget
from antiphon.model_worker.batching.waiting_queue import QueueRules
from antiphon.wire.codec import unpack_ids
from antiphon.wire.command import PauseMode
from antiphon.wire.ids import RequestId
from antiphon.wire.sampling import TokenOutputParams
from antiphon.wire.token_outputs import unpack_floats

if TYPE_CHECKING:
    from antiphon.model_worker.batching.request import Request
    from antiphon.model_worker.batching.state import Progress

STEM = list(range(40, 76))


@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=10),
    step=st.integers(1, 64),
    chunk=st.none() | st.integers(1, 64),
    fill=st.none() | st.integers(1, 64),
    prompts=st.none() | st.integers(1, 3),
)
def test_plan_takes_prefills_in_order_until_it_is_full(
    lengths: list[int], step: int, chunk: int | None, fill: int | None, prompts: int | None
) -> None:
    limits = msgspec.structs.replace(
        LIMITS, step_tokens_max=step, chunk_tokens=chunk, fill_tokens=fill, prefill_max=prompts
    )
    budget = TokenBudget(limits, PAGE_TOKENS)
    taken: list[int] = []
    for length in lengths:
        piece = budget.prefill_chunk(0, length)
        if not piece:
            break
        taken.append(piece)
        budget.spend_prefill(piece)
    assert taken, "a plan took nothing"
    assert len(taken) <= (prompts or len(lengths))
    assert all(taken[i] == lengths[i] for i in range(len(taken) - 1) if chunk is None)
    if chunk is not None:
        assert sum(taken) <= step
        assert max(taken) <= chunk
    else:
        assert sum(taken) <= step or len(taken) == 1
    assert sum(taken[:-1]) < (fill or 10_000)
    assert sum(taken[1:]) <= (fill or 10_000)
    for piece, length in zip(taken[1:], lengths[1:], strict=False):
        assert piece == length or piece % PAGE_TOKENS == 0


def test_a_prefill_that_does_not_reach_a_page_border_waits_behind_another() -> None:
    limits = msgspec.structs.replace(LIMITS, step_tokens_max=3, chunk_tokens=64)
    budget = TokenBudget(limits, PAGE_TOKENS)
    budget.spend_prefill(budget.prefill_chunk(0, 2))
    assert budget.tokens == 1
    assert budget.prefill_chunk(1, 6) == 0


def test_chunks_of_a_prompt_are_longer_while_there_is_no_other_request() -> None:
    steps = Steps(
        pages=60, context_tokens=200, step_tokens_max=64, chunk_tokens=16, alone_tokens=40
    )
    steps.add(1, [1] * 100, max_new_tokens=3)
    assert [steps.go(), steps.go()] == [[(1, 40)], [(1, 40)]]
    steps.add(2, [2] * 50, max_new_tokens=3)
    assert steps.go() == [(1, 16), (2, 16)]
    assert steps.go() == [(1, 4), (2, 16)]
    assert steps.go() == [(1, 1), (2, 16)]
    assert steps.go() == [(1, 1), (2, 2)]
    while len(rows := steps.go()) > 1:
        assert max(length for _, length in rows) == 1
    steps.add(3, [3] * 50)
    assert (3, 16) in steps.go(), "another still decodes"


def test_pages_of_a_window_are_reserved_for_a_chunk_of_a_prompt_alone() -> None:
    steps = Steps(
        pages=60,
        window=8,
        context_tokens=200,
        step_tokens_max=64,
        chunk_tokens=8,
        alone_tokens=60,
    )
    steps.add(1, [1] * 150, max_new_tokens=3)
    assert steps.go() == [(1, 60)]
    budget = steps.batching.batch.page_budget
    assert budget.reserved()[1] >= 60 // PAGE_TOKENS
    assert steps.go() == [(1, 60)]


def burst(step_s: Any, **limits: Any) -> list[float]:
    """When each of 16 prompts of 128 tokens has its first token, all coming at once."""
    steps = Steps(
        pages=16 * 60,
        running_max=16,
        step_tokens_max=4096,
        context_tokens=256,
        **limits,
    )
    for key in range(16):
        steps.add(key, [key] * 128, max_new_tokens=100, ignore_eos=True)
    first: dict[int, float] = {}
    now = 0.0
    while len(first) < 16:
        now += step_s(sum(length for _, length in steps.go()))
        for progress in steps.progress():
            first.setdefault(progress.key, now)
    assert list(first) == list(range(16)), "the first did not come first"
    return sorted(first.values())


def on_two_cores(tokens: int) -> float:
    """A small model: reading the weights takes as long as computing 16 tokens."""
    return 0.6e-3 * max(16, tokens)


def test_first_requests_of_a_burst_decode_before_the_last_prefill() -> None:
    together = burst(on_two_cores, chunk_tokens=4096)
    one_by_one = burst(on_two_cores, chunk_tokens=512, fill_tokens=256)
    assert together[0] == together[-1]
    assert one_by_one[7] <= 0.6 * together[7]
    assert one_by_one[-1] <= 1.05 * together[-1]
    in_turns = burst(on_two_cores, chunk_tokens=512, fill_tokens=256, mixed=False)
    assert one_by_one[-1] < in_turns[-1], "mixed steps are the better default here"


@pytest.mark.parametrize("mixed", [True, False])
def test_decode_waits_for_at_most_one_step(mixed: bool) -> None:
    steps = Steps(pages=60, mixed=mixed, context_tokens=200)
    steps.add(1, max_new_tokens=60)
    steps.go()
    steps.add(2, [5] * 100)
    seen = [steps.go() for _ in range(30)]
    decodes = [(1, 1) in rows for rows in seen]
    assert all(a or b for a, b in itertools.pairwise(decodes))
    assert all(decodes) == mixed
    prompts = [rows for rows in seen if any(key == 2 and length > 1 for key, length in rows)]
    assert all(((1, 1) in rows) == mixed for rows in prompts)
    assert sum(length for rows in prompts for key, length in rows if key == 2) == 100


def order(
    policy: Policy, prepare: Any, requests: list[dict[str, Any]], slots: int = 1, **rules: Any
) -> list[int]:
    """The order in which waiting requests are started when so many slots become free."""
    steps = Steps(
        pages=400,
        running_max=slots,
        cached=True,
        context_tokens=200,
        step_tokens_max=256,
        rules=QueueRules(policy=policy, max_overtake_s=1_000.0, **rules),
    )
    for prompt in prepare:
        steps.add(100, prompt, max_new_tokens=1)
        steps.drain()
    for key in range(slots):
        steps.add(99 - key, 3, max_new_tokens=2)
    steps.go()
    for key, said in enumerate(requests):
        steps.add(key, **said)
    started: list[int] = []
    while not steps.batching.idle:
        for key, _ in steps.go():
            if key < len(requests) and key not in started:
                started.append(key)
    return started


def test_lof_starts_the_longest_output_first() -> None:
    requests = [{"max_new_tokens": n} for n in (2, 9, 4, 9)]
    assert order(Policy.LOF, [], requests) == [1, 3, 2, 0]


def test_lpm_starts_the_longest_cached_prefix_first() -> None:
    prompts = [1] * 20, [*STEM[:12], *[2] * 20], [*STEM[:30], 3], STEM[:3]
    requests = [{"prompt": prompt} for prompt in prompts]
    assert order(Policy.LPM, [STEM], requests) == [2, 1, 0, 3]


def test_dfs_weight_stays_in_the_largest_subtree() -> None:
    stem, other = STEM[:8], [9] * 4
    left, right = [*stem, *[1] * 8], [*stem, *[2] * 8]
    prompts = [*left, 5], [*right, 5, 5], other, [*right, 6], [*left, 6], [*right, 7], [*stem, 3]
    requests = [{"prompt": prompt} for prompt in prompts]
    assert order(Policy.DFS_WEIGHT, [left, right], requests, slots=7) == [1, 3, 5, 0, 4, 6, 2]


def test_random_policy_differs_from_others_and_is_reproducible() -> None:
    requests: list[dict[str, Any]] = [{} for _ in range(8)]
    drawn = order(Policy.RANDOM, [], requests)
    assert sorted(drawn) == list(range(8)) != drawn
    assert order(Policy.RANDOM, [], requests) == drawn


@pytest.mark.parametrize(("low_first", "expected"), [(False, [2, 0, 3, 1]), (True, [1, 0, 3, 2])])
def test_priorities_go_before_the_policy(low_first: bool, expected: list[int]) -> None:
    requests = [{"priority": n} for n in (1, 0, 5, 1)]
    assert order(Policy.FCFS, [], requests, priority=True, low_first=low_first) == expected
    assert order(Policy.FCFS, [], requests) == [0, 1, 2, 3]


def test_priority_is_rejected_where_disabled_if_configured() -> None:
    steps = Steps(rules=QueueRules(refuse_priority=True))
    steps.add(1, priority=1)
    steps.add(2)
    (progress,) = steps.progress()
    assert error_of(progress.finish).param == "priority"


def test_tree_policies_fall_back_to_arrival_beyond_128_waiting() -> None:
    steps = Steps(
        pages=400, running_max=1, cached=True, queue_max=500, rules=QueueRules(policy=Policy.LPM)
    )
    steps.add(1000, STEM, max_new_tokens=1)
    steps.drain()
    for key in range(130):
        steps.add(key, [key % 90] * 8, max_new_tokens=1)
    steps.add(500, STEM, max_new_tokens=1)
    started = [key for _ in range(8) for key, _ in steps.go()]
    assert started[0] == 0
    assert 500 in started[:6], "it was not passed over when fewer waited"


def test_request_is_overtaken_for_no_longer_than_allowed() -> None:
    steps = Steps(
        pages=400, running_max=1, rules=QueueRules(priority=True, max_overtake_s=5.0), queue_max=99
    )
    steps.add(0, priority=9, max_new_tokens=1)
    steps.add(1, priority=0, max_new_tokens=3)
    started: list[int] = []
    for turn in range(12):
        steps.add(10 + turn, priority=9, max_new_tokens=1)
        started += [key for key, _ in steps.go()]
    assert started[:6] == [0, 10, 11, 12, 13, 14]
    assert started[6:9] == [1, 1, 1], "it was preempted, or passed again"


def test_higher_priority_preempts_the_lowest() -> None:
    rules = QueueRules(priority=True, preempt_threshold=3)
    steps = Steps(pages=40, running_max=2, cached=True, rules=rules)
    steps.add(1, range(8), priority=2)
    steps.add(2, range(20, 28), priority=1)
    steps.go()
    steps.add(3, range(40, 48), priority=4)
    steps.go()
    assert steps.running() == [1, 2], "4 is not more than 3 above 1"
    steps.add(4, range(60, 68), priority=5)
    steps.go()
    assert sorted(steps.running()) == [1, 4]
    assert steps.batching.planner.preemptions == 1
    assert steps.batching.planner.retractions == 0
    steps.drain()
    finishes = {p.key: p.finish.error for p in steps.progress() if p.finish}
    assert finishes == dict.fromkeys((1, 2, 3, 4))


def test_preemption_happens_only_if_it_frees_enough_pages() -> None:
    steps = Steps(pages=10, running_max=3, rules=QueueRules(priority=True, preempt_threshold=0))
    steps.add(1, range(20), priority=9, max_new_tokens=8, ignore_eos=True)
    steps.add(2, [1], priority=0, max_new_tokens=4, ignore_eos=True)
    steps.go()
    assert steps.running() == [1, 2]
    steps.add(3, range(20, 35), priority=5, max_new_tokens=9, ignore_eos=True)
    steps.go()
    assert steps.batching.planner.preemptions == 0


def test_preemption_does_not_happen_with_free_pages() -> None:
    steps = Steps(pages=40, running_max=3, rules=QueueRules(priority=True, preempt_threshold=0))
    steps.add(1, priority=0)
    steps.add(2, priority=9)
    steps.go()
    assert steps.running() == [2, 1]


def test_requests_with_a_common_prefix_wait_for_the_first_prefill() -> None:
    steps = Steps(pages=60, cached=True, step_tokens_max=256, chunk_tokens=256)
    for key in range(3):
        steps.add(key, [*STEM, key])
    steps.add(3, [1, 2])
    assert steps.go() == [(0, 37), (3, 2)]
    assert steps.go() == [(0, 1), (3, 1), (1, 1), (2, 1)]


def test_request_does_not_wait_for_a_leader_that_left() -> None:
    steps = Steps(pages=60, cached=True)
    for key in range(2):
        steps.add(key, [*STEM, key])
    assert steps.go() == [(0, 8)]
    steps.drop(0)
    assert steps.go() == [(1, 8)]


def test_short_common_prefix_is_not_waited_for() -> None:
    steps = Steps(pages=60, cached=True)
    for key in range(2):
        steps.add(key, [*STEM[:5], key])
    assert steps.go() == [(0, 6), (1, 6)]


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("cached", [True, False], ids=["tree", "fork"])
def test_choices_of_a_request_share_its_prefill(cached: bool, window: int | None) -> None:
    steps = Steps(pages=60, cached=cached, window=window, step_tokens_max=256, chunk_tokens=256)
    for key in range(3):
        steps.add(key, STEM[:22], request_id=RequestId("one"), choice=key)
    assert steps.go() == [(0, 22)]
    assert steps.go() == [(0, 1), (1, 2), (2, 2)]
    tables = [request.table for request in steps.batching.running.values()]
    beginnings = {tuple(table.pages(0)[:5]) for table in tables if table is not None}
    assert len(beginnings) == 1
    steps.drain()
    steps.batching.flush()
    steps.pools.finished(1_000)
    assert steps.pools.used() == [0] * len(steps.pools.groups)


@pytest.mark.parametrize(("salt", "found"), [(b"a" * 32, 36), (b"b" * 32, 0), (b"", 0)])
def test_prefix_matches_only_with_the_same_salt(salt: bytes, found: int) -> None:
    steps = Steps(pages=60, cached=True, step_tokens_max=256, chunk_tokens=256)
    steps.add(0, [*STEM, 1], cache_salt=b"a" * 32, max_new_tokens=1)
    steps.go()
    steps.add(1, [*STEM, 2], cache_salt=salt)
    steps.go()
    (request,) = steps.batching.running.values()
    assert request.cached_tokens == found


def test_request_does_not_wait_for_a_prefill_of_another_salt() -> None:
    steps = Steps(pages=60, cached=True, step_tokens_max=256, chunk_tokens=256)
    for key, salt in enumerate((b"a" * 32, b"b" * 32, b"a" * 32)):
        steps.add(key, [*STEM, key], cache_salt=salt)
    assert steps.go() == [(0, 37), (1, 37)]
    assert steps.go() == [(0, 1), (1, 1), (2, 1)]


def test_cached_tokens_exclude_own_tokens_after_a_retraction() -> None:
    steps = Steps(pages=60, cached=True, step_tokens_max=256, chunk_tokens=256, context_tokens=200)
    steps.add(1, 30, max_new_tokens=60, ignore_eos=True)
    for _ in range(40):
        steps.go()
    (request,) = steps.batching.running.values()
    steps.batching.prepare_pause(PauseMode.RETRACT)
    steps.go()
    assert (request.retractions, request.cached_tokens) == (1, 0)
    assert request.found_tokens > request.prompt_tokens, "it found nothing again"
    assert {p.cached_tokens for p in steps.progress()} == {0}


def test_salt_stays_with_a_request_across_weight_versions() -> None:
    steps = Steps(pages=60, cached=True, step_tokens_max=256, chunk_tokens=256)
    salts = (b"a" * 32, b"a" * 32, b"b" * 32)
    for key, salt in enumerate(salts):
        steps.batching.set_weight_version(str(key))
        for again in range(2):
            steps.add(10 * key + again, [*STEM, again], cache_salt=salt, max_new_tokens=1)
            steps.go()
        found = [p.cached_tokens for p in steps.progress()]
        assert found == [0, len(STEM)]


@pytest.mark.parametrize("cached", [True, False], ids=["tree", "fork"])
def test_pages_of_older_weights_are_not_shared(cached: bool) -> None:
    steps = Steps(pages=60, cached=cached, step_tokens_max=256, chunk_tokens=256)
    for key in range(2):
        steps.add(key, STEM[:22], request_id=RequestId("one"), choice=key)
    assert steps.go() == [(0, 22)]
    steps.batching.set_weight_version("newer")
    assert steps.go() == [(0, 1), (1, 22)]


def test_prompt_logprobs_of_older_weights_are_discarded() -> None:
    steps = Steps(pages=60, step_tokens_max=8, chunk_tokens=8)
    details = TokenOutputParams(logprobs=True, prompt_start=0)
    steps.add(0, STEM[:20], max_new_tokens=2, details=details)
    reported = [run_with_logprobs(steps, logprob=-1.0)]
    steps.batching.set_weight_version("newer")
    reported += [run_with_logprobs(steps, logprob=-2.0) for _ in range(3)]
    (news,) = itertools.chain(*reported)
    assert list(unpack_ids(news.details.token_ids)) == STEM[1:20]
    assert set(unpack_floats(news.details.logprobs)) == {-2.0}
    assert output_logprobs(news) == [-2.0]
    # What was reported with the first token of the answer is not reported again.
    steps.batching.set_weight_version("newest")
    (news,) = run_with_logprobs(steps, logprob=-3.0)
    assert (news.details.count, output_logprobs(news)) == (0, [-3.0])


def output_logprobs(news: Progress) -> list[float]:
    assert news.outputs is not None
    return news.outputs.read_logprobs(news.start, news.end).tolist()


def run_with_logprobs(steps: Steps, logprob: float) -> tuple[Progress, ...]:
    """A step in which all rows that draw draw 1, and every log-probability is the same."""
    rows = steps.next()
    plan = build_plan(1, rows, steps.batching.batch, PLAIN)
    assert plan.details is not None
    drawn = [1] * len(plan.logit_tokens)
    ids = np.array([*plan.details.prompt_targets, *drawn], np.int32)
    none = np.zeros((len(ids), 0), np.float32)
    made = LogprobsBatch(
        starts=np.array([0, len(ids)], np.int32),
        token_ids=ids,
        logprobs=np.full(len(ids), logprob, np.float32),
        top_ids=none.astype(np.int32),
        top_logprobs=none,
        named_logprobs=none,
    )
    steps.batching.commit(rows, msgspec.structs.replace(outcome(1, [drawn]), details=made))
    return tuple(steps.progress())


def test_choice_too_late_for_a_window_prefills_itself() -> None:
    steps = Steps(pages=60, window=6, running_max=1)
    steps.add(0, STEM[:22], request_id=RequestId("one"), choice=0, max_new_tokens=9)
    steps.add(1, STEM[:22], request_id=RequestId("one"), choice=1, max_new_tokens=9)
    rows = [steps.go() for _ in range(14)]
    assert [(1, 8)] in rows


@pytest.mark.parametrize("seed", range(5))
def test_queue_order_by_arrival_holds_for_any_sequence(seed: int) -> None:
    chance = random.Random(seed)
    steps = Steps(pages=400, running_max=4, queue_max=999)
    started: list[int] = []
    for key in range(150):
        steps.add(key, chance.randint(1, 20), max_new_tokens=chance.randint(1, 4))
        if chance.random() < 0.2:
            steps.drop(chance.randint(0, key))
        started += [key for key, _ in steps.lengths(steps.next()) if key not in started]
        if chance.random() < 0.5:
            for key_running in steps.running():
                steps.drop(key_running)
    assert started == sorted(started)


@pytest.mark.parametrize("waiting", [[40], [40, 50]], ids=["one waits", "two wait"])
def test_cached_prefix_of_the_first_waiting_request_is_evicted_last(waiting: list[int]) -> None:
    steps = Steps(pages=10, running_max=1, cached=True)
    for token in (40, 50):
        steps.add(token, [token] * 8, max_new_tokens=1)
        steps.go()
    steps.add(2, [60] * 12, max_new_tokens=20, ignore_eos=True)
    steps.go()
    for key, token in enumerate(waiting, start=3):
        steps.add(key, [*[token] * 8, 1])
    while 3 not in steps.running():
        steps.go()
    assert steps.batching.running[0].cached_tokens == 8
    if len(waiting) == 1:
        assert steps.cached_tokens([*[50] * 8, 1]) == 0


def test_cached_prefix_is_used_where_the_leaders_window_moved_on() -> None:
    steps = Steps(
        pages=120, cached=True, window=6, step_tokens_max=256, chunk_tokens=256, context_tokens=200
    )
    steps.add(0, STEM, max_new_tokens=1)
    steps.drain()
    shared = [*STEM, *range(40)]
    for key in (1, 2):
        steps.add(key, [*shared, *[key] * 20], max_new_tokens=4)
    assert steps.go() == [(1, 60)], "the second did not wait for what the first computes"
    assert steps.go() == [(1, 1), (2, 60)], "what the tree had was computed again"
    assert [r.cached_tokens for r in steps.batching.running.values()] == [len(STEM)] * 2


def test_waiting_request_counts_no_cache_hit() -> None:
    steps = Steps(pages=10, running_max=2, cached=True)
    steps.add(0, [40] * 8, max_new_tokens=1)
    steps.go()
    steps.add(1, [60] * 12, max_new_tokens=20, ignore_eos=True)
    steps.go()
    steps.add(2, [*[40] * 8, 1], max_new_tokens=1)
    hits = [(steps.running(), steps.hits([40])) for _ in range(5) if steps.go()]
    assert hits == [([1], 0)] * 5, "waiting was counted as a use"
    steps.drain()
    assert steps.hits([40]) == 1


def test_repeatedly_preempted_request_is_overtaken_no_longer_than_allowed() -> None:
    rules = QueueRules(priority=True, preempt_threshold=0, max_overtake_s=10.0)
    steps = Steps(pages=400, running_max=1, rules=rules)
    steps.add(0, priority=0, max_new_tokens=30, ignore_eos=True)
    steps.go()
    for key in range(1, 6):  # each takes 8 s, and each preempts who runs, if it may
        while steps.running() != [0]:
            steps.go()
        steps.add(key, priority=9, max_new_tokens=8, ignore_eos=True)
        steps.go()
    assert steps.batching.planner.preemptions == 2, "it gave way although it had waited 16 s in all"


def test_prompt_is_compared_once_with_each_prefilling_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[tuple[int, int]] = []

    def agreed(a: Request, b: Request, longest: int) -> int:
        compared.append((a.key, b.key))
        return agreed_in_full(a, b, longest)

    agreed_in_full = prefixes._common_length
    monkeypatch.setattr(prefixes, "_common_length", agreed)
    steps = Steps(pages=10, cached=True, chunk_tokens=2, step_tokens_max=8)
    steps.add(1, [*STEM[:4], *range(16)], max_new_tokens=16, ignore_eos=True)
    steps.go()
    steps.add(2, [*STEM[:4], *range(50, 58)], max_new_tokens=8, ignore_eos=True)
    for _ in range(6):
        steps.go()
    assert steps.running() == [1], "there was room for both"
    assert compared == [(1, 2)]
