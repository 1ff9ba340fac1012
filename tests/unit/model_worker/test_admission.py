"""Who is refused, who waits and who gives way."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from antiphon.model_worker.batching.admission import Limits, check, outputs_max
from antiphon.model_worker.batching.batching import Batching
from antiphon.model_worker.batching.builder import build_plan
from antiphon.model_worker.batching.plan import Outcome
from antiphon.model_worker.batching.request import ChoiceKey, Progress, RequestState
from antiphon.model_worker.cache.groups import CacheGroup, GroupKind
from antiphon.model_worker.cache.table import CachePools
from antiphon.wire.base import FinishReason
from antiphon.wire.codec import pack_ids, unpack_ids
from antiphon.wire.errors import InvalidRequest, PromptTooLong, Unsupported
from antiphon.wire.ids import RequestId
from antiphon.wire.sampling import SamplingParams

LIMITS = Limits(
    step_tokens_max=16,
    chunk_tokens=8,
    running_max=4,
    context_tokens=40,
    vocab_size=100,
    end_ids=frozenset({9}),
    weights_digest="w",
    headroom_tokens=4,
)


def state(prompt_tokens: int = 3, **sampling: Any) -> RequestState:
    params: dict[str, Any] = {"max_new_tokens": 8} | sampling
    return RequestState(
        request_id=RequestId("r"),
        choice=0,
        prompt_ids=pack_ids(range(10, 10 + prompt_tokens)),
        sampling=SamplingParams(**params),
        deadline_unix_ms=0,
    )


def batching(pages: int = 10, **limits: int) -> Batching:
    group = CacheGroup(
        kind=GroupKind.FULL, layers=(0,), page_bytes=1, page_tokens=4, pages_total=pages
    )
    return Batching(msgspec.structs.replace(LIMITS, **limits), CachePools([group]))


def run(loop: Batching, *tokens: list[int]) -> tuple[Progress, ...]:
    """One step in which row i accepts `tokens[i]`."""
    rows = loop.next_rows()
    assert len(rows) == len(tokens)
    outcome = Outcome(
        step=1,
        starts=np.cumsum([0, *map(len, tokens)], dtype=np.int32),
        token_ids=np.array([t for ids in tokens for t in ids], np.int32),
        status=np.zeros(len(rows), np.int32),
    )
    loop.commit(rows, outcome)
    return loop.take_progress()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"prompt_ids": b""}, InvalidRequest),
        ({"prompt_ids": b"abc"}, InvalidRequest),
        ({"prompt_ids": pack_ids([100])}, InvalidRequest),
        ({"prompt_ids": pack_ids([-1])}, InvalidRequest),
        ({"prompt_ids": pack_ids([1] * 40)}, PromptTooLong),
        ({"weights_digest": "other"}, Unsupported),
        ({"adapter_digest": "a"}, Unsupported),
    ],
)
def test_what_can_never_run_is_refused(
    change: dict[str, str | bytes], error: type[Exception]
) -> None:
    with pytest.raises(error) as refused:
        check(msgspec.structs.replace(state(), **change), LIMITS)
    assert type(refused.value) is error


def test_a_prompt_that_fills_the_context_may_ask_for_nothing_more() -> None:
    check(state(40, max_new_tokens=0), LIMITS)


def test_the_answer_is_clipped_to_the_context() -> None:
    assert outputs_max(state(30, max_new_tokens=1000), LIMITS) == 10


def test_no_tokens_asked_for_is_an_end_at_once() -> None:
    loop = batching()
    loop.add(ChoiceKey(1), state(max_new_tokens=0))
    (progress,) = loop.take_progress()
    assert progress.finish is not None
    assert (progress.finish.reason, progress.token_ids) == (FinishReason.LENGTH, b"")
    assert loop.idle


@pytest.mark.parametrize(
    ("sampling", "said", "matched"),
    [
        ({}, [5], 9),
        ({"stop_token_ids": (5,)}, [], 5),
        ({"ignore_eos": True, "stop_token_ids": (5,)}, [5, 9, 7], None),
        ({"max_new_tokens": 2, "ignore_eos": True}, [5, 9], None),
    ],
)
def test_where_a_choice_ends_within_the_tokens_of_one_step(
    sampling: dict[str, Any], said: list[int], matched: int | None
) -> None:
    loop = batching()
    loop.add(ChoiceKey(1), state(**sampling))
    (progress,) = run(loop, [5, 9, 7])
    assert list(unpack_ids(progress.token_ids)) == said
    assert (progress.finish.matched_stop if progress.finish else None) == matched


def test_a_long_prompt_is_computed_in_chunks_beside_those_who_decode() -> None:
    loop = batching(pages=10)
    loop.add(ChoiceKey(1), state(3))
    run(loop, [5])
    loop.add(ChoiceKey(2), state(20))
    run(loop, [5], [])
    rows = loop.next_rows()
    assert [(row.start, row.length, row.draws) for row in rows] == [(4, 1, True), (8, 8, False)]
    plan = build_plan(1, rows, groups=1)
    assert plan.positions.tolist() == [[4, *range(8, 16)]]
    assert plan.kv_len.tolist() == [5, 16]
    assert plan.logit_tokens.tolist() == [0]


def test_a_row_that_draws_nothing_is_tried_again() -> None:
    loop = batching()
    loop.add(ChoiceKey(1), state(3))
    assert run(loop, []) == ()
    (row,) = loop.next_rows()
    assert (row.start, row.length, row.draws) == (2, 1, True)


def test_whoever_does_not_fit_beside_the_others_waits() -> None:
    loop = batching(pages=10)
    loop.add(ChoiceKey(1), state(16, max_new_tokens=16))
    loop.add(ChoiceKey(2), state(20, max_new_tokens=16))
    assert [row.request.key for row in loop.next_rows()] == [1]
    assert len(loop.waiting) == 1
    loop.drop(ChoiceKey(1))
    assert [row.request.key for row in loop.next_rows()] == [2]


def test_the_youngest_gives_way_and_keeps_its_tokens_and_its_place() -> None:
    loop = batching(pages=10, context_tokens=40)
    loop.add(ChoiceKey(1), state(15, max_new_tokens=25))
    loop.add(ChoiceKey(2), state(15, max_new_tokens=25))
    run(loop, [], [])
    run(loop, [1], [1])
    while len(rows := loop.next_rows()) == 2:
        run(loop, [1], [1])
    assert (len(rows), loop.retractions) == (1, 1)
    assert [request.key for request in loop.running.values()] == [1]
    waiting = loop.waiting.first()
    assert waiting is not None
    assert (waiting.key, waiting.outputs > 3, waiting.table) == (2, True, None)
    loop.add(ChoiceKey(3), state(3))
    assert loop.waiting.first() is waiting
