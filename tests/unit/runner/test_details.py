from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from antiphon.kernels.op import DeviceCapability
from antiphon.kernels.ops import select
from antiphon.model_worker.batching.plan import (
    LogprobsBatch,
    LogprobsRequest,
    SamplingColumns,
    StepPlan,
)
from antiphon.model_worker.runner.logprobs import LogprobsComputer

VOCABULARY, HIDDEN = 50, 8
GENERATOR = torch.Generator().manual_seed(6)
HEAD = torch.randn(HIDDEN, VOCABULARY, generator=GENERATOR)
TOKENS = 12  # of three rows: a whole prompt of 5, a verify row of 3, a chunk of 4
STATES = torch.randn(TOKENS, HIDDEN, generator=GENERATOR)
LENGTHS = (5, 3, 4)
LOGIT_TOKENS = (4, 5, 6, 7)
STARTS, ACCEPTED = (0, 1, 3, 3), (30, 31, 32)  # the verify row accepts two of its three


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def plan_of(
    wanted: LogprobsRequest | None, temperature: tuple[float, ...] = (0.5, 0.0, 1.0)
) -> StepPlan:
    rows = len(LENGTHS)
    return StepPlan(
        step=1,
        slot=np.arange(rows, dtype=np.int32),
        query_start=ints(0, 5, 8),
        query_len=ints(*LENGTHS),
        kv_len=ints(*LENGTHS),
        adapter=ints(-1, -1, -1),
        tokens=np.zeros(TOKENS, np.int32),
        positions=np.zeros((1, TOKENS), np.int32),
        logit_tokens=ints(*LOGIT_TOKENS),
        sampling=SamplingColumns(
            temperature=np.array(temperature, np.float32),
            top_p=np.ones(rows, np.float32),
            min_p=np.zeros(rows, np.float32),
            top_k=np.zeros(rows, np.int32),
            seed=np.zeros(rows, np.int64),
            choice=np.zeros(rows, np.int32),
        ),
        page_tables=(),
        details=wanted,
    )


EVERYTHING = LogprobsRequest(
    rows=ints(0, 1, 2),
    logprobs=np.array([True, True, True]),
    top=ints(2, 0, 4),
    named_starts=ints(0, 1, 1, 3),
    named_ids=ints(9, 10, 11),
    hidden=np.array([False, True, False]),
    prompt_tokens=ints(1, 2, 8, 11),
    prompt_targets=ints(20, 21, 22, -1),
)


def told(wanted: LogprobsRequest | None = EVERYTHING, **options: int) -> LogprobsBatch | None:
    teller = LogprobsComputer(select(DeviceCapability("cpu")), **options)
    logits = STATES[list(LOGIT_TOKENS)] @ HEAD
    accepted = (ints(*STARTS), ints(*ACCEPTED))
    return teller.compute(plan_of(wanted), STATES, logits, lambda states: states @ HEAD, accepted)


def expected(place: int, temperature: float = 1.0) -> np.ndarray:
    scaled = (STATES[place].double() @ HEAD.double()) / temperature
    return torch.log_softmax(scaled, dim=-1).numpy()


def test_prompt_tokens_come_before_what_their_row_drew() -> None:
    details = told()
    assert details is not None
    assert details.starts.tolist() == [0, 3, 5, 7]
    assert details.token_ids.tolist() == [20, 21, 30, 31, 32, 22, -1]


def test_every_number_is_that_of_the_softmax_in_float64() -> None:
    details = told()
    assert details is not None
    rows = [
        (1, 1.0, 20, 2, [9]),
        (2, 1.0, 21, 2, [9]),
        (4, 0.5, 30, 2, [9]),
        (5, 1.0, 31, 0, []),  # greedy: temperature 1
        (6, 1.0, 32, 0, []),
        (8, 1.0, 22, 4, [10, 11]),
        (11, 1.0, -1, 4, [10, 11]),
    ]
    for number, (place, temperature, token, top, named) in enumerate(rows):
        want = expected(place, temperature)
        if token >= 0:
            np.testing.assert_allclose(details.logprobs[number], want[token], atol=1e-5)
        else:
            assert np.isnan(details.logprobs[number])
        likeliest = np.argsort(-want)[:top]
        assert details.top_ids[number, :top].tolist() == likeliest.tolist()
        got = details.top_logprobs[number, :top]
        np.testing.assert_allclose(got, want[likeliest], atol=1e-5)
        got = details.named_logprobs[number, : len(named)]
        np.testing.assert_allclose(got, want[named], atol=1e-5)
    assert details.hidden is not None
    assert torch.equal(torch.as_tensor(details.hidden[3:5]), STATES[5:7])


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_however_few_rows_of_logits_fit_at_once_the_same_is_told(rows: int) -> None:
    whole, pieces = told(), told(logit_bytes_max=4 * VOCABULARY * rows)
    assert whole is not None
    assert pieces is not None
    np.testing.assert_allclose(pieces.logprobs, whole.logprobs, atol=1e-6)
    np.testing.assert_array_equal(pieces.top_ids, whole.top_ids)
    np.testing.assert_allclose(pieces.named_logprobs, whole.named_logprobs, atol=1e-6)


def test_rows_that_want_no_logprobs_cost_no_logits() -> None:
    only_states = replace(
        EVERYTHING,
        logprobs=np.zeros(3, np.bool_),
        top=ints(0, 0, 0),
        named_starts=ints(0, 0, 0, 0),
        named_ids=ints(),
        hidden=np.ones(3, np.bool_),
    )
    teller = LogprobsComputer(select(DeviceCapability("cpu")))

    def head(states: torch.Tensor) -> torch.Tensor:
        raise AssertionError(f"{len(states)} rows of logits that nobody wants")

    logits = STATES[list(LOGIT_TOKENS)] @ HEAD
    accepted = (ints(*STARTS), ints(*ACCEPTED))
    details = teller.compute(plan_of(only_states), STATES, logits, head, accepted)
    assert details is not None
    assert details.hidden is not None
    assert details.hidden.shape == (7, HIDDEN)
    assert details.top_ids.shape == (7, 0)


def test_a_plan_without_wishes_is_told_nothing_of() -> None:
    assert told(None) is None


def test_no_more_of_the_likeliest_are_told_than_there_are() -> None:
    details = told(replace(EVERYTHING, top=ints(VOCABULARY + 5, 0, 0)))
    assert details is not None
    assert sorted(details.top_ids[0, :VOCABULARY].tolist()) == list(range(VOCABULARY))
    assert (details.top_ids[0, VOCABULARY:] == -1).all()
    assert np.isnan(details.top_logprobs[0, VOCABULARY:]).all()
