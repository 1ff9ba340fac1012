from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.worker import ints, sampling_columns, step_plan

from antiphon.kernels.op import DeviceCapability
from antiphon.kernels.ops import select
from antiphon.model_worker.batching.plan import LogprobsBatch, LogprobsRequest
from antiphon.model_worker.runner.logprobs import LogprobsComputer

Head = Callable[[torch.Tensor], torch.Tensor]
VOCABULARY, HIDDEN = 50, 8
GENERATOR = torch.Generator().manual_seed(6)
HEAD = torch.randn(HIDDEN, VOCABULARY, generator=GENERATOR)
TOKENS = 12  # of three rows: a whole prompt of 5, a verify row of 3, a chunk of 4
STATES = torch.randn(TOKENS, HIDDEN, generator=GENERATOR)
LENGTHS = (5, 3, 4)
LOGIT_TOKENS = (4, 5, 6, 7)
STARTS, ACCEPTED = (0, 1, 3, 3), (30, 31, 32)  # the verify row accepts two of its three


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


def head_of(states: torch.Tensor) -> torch.Tensor:
    return states @ HEAD


def outputs(
    wanted: LogprobsRequest | None = EVERYTHING, head: Head = head_of, **options: Any
) -> LogprobsBatch | None:
    computer = LogprobsComputer(select(DeviceCapability("cpu")), **options)
    plan = step_plan(
        LENGTHS,
        logit_tokens=ints(*LOGIT_TOKENS),
        sampling=sampling_columns(3, temperature=(0.5, 0.0, 1.0)),
        details=wanted,
    )
    accepted = (ints(*STARTS), ints(*ACCEPTED))
    return computer.compute(plan, STATES, head_of(STATES[list(LOGIT_TOKENS)]), head, accepted)


def computed(logit_bytes_max: int = 1 << 20) -> LogprobsBatch:
    batch = outputs(logit_bytes_max=logit_bytes_max)
    assert batch is not None
    return batch


def expected(place: int, temperature: float = 1.0) -> np.ndarray:
    scaled = (STATES[place].double() @ HEAD.double()) / temperature
    return torch.log_softmax(scaled, dim=-1).numpy()


def test_prompt_tokens_come_before_what_their_row_drew() -> None:
    details = computed()
    assert details.starts.tolist() == [0, 3, 5, 7]
    assert details.token_ids.tolist() == [20, 21, 30, 31, 32, 22, -1]


def test_every_number_is_that_of_the_softmax_in_float64() -> None:
    details = computed()
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
def test_logprobs_do_not_depend_on_how_many_rows_of_logits_fit_at_once(rows: int) -> None:
    whole, pieces = computed(), computed(logit_bytes_max=4 * VOCABULARY * rows)
    np.testing.assert_allclose(pieces.logprobs, whole.logprobs, atol=1e-6)
    np.testing.assert_array_equal(pieces.top_ids, whole.top_ids)
    np.testing.assert_allclose(pieces.named_logprobs, whole.named_logprobs, atol=1e-6)


def test_rows_without_logprobs_compute_no_logits() -> None:
    only_states = replace(
        EVERYTHING,
        logprobs=np.zeros(3, np.bool_),
        top=ints(0, 0, 0),
        named_starts=ints(0, 0, 0, 0),
        named_ids=ints(),
        hidden=np.ones(3, np.bool_),
    )

    def head(states: torch.Tensor) -> torch.Tensor:
        raise AssertionError(f"{len(states)} rows of logits that no row requests")

    details = outputs(only_states, head)
    assert details is not None
    assert details.hidden is not None
    assert details.hidden.shape == (7, HIDDEN)
    assert details.top_ids.shape == (7, 0)


def test_a_plan_without_a_request_for_logprobs_has_none() -> None:
    assert outputs(None) is None


def test_no_more_top_logprobs_are_given_than_there_are_tokens() -> None:
    details = outputs(replace(EVERYTHING, top=ints(VOCABULARY + 5, 0, 0)))
    assert details is not None
    assert sorted(details.top_ids[0, :VOCABULARY].tolist()) == list(range(VOCABULARY))
    assert (details.top_ids[0, VOCABULARY:] == -1).all()
    assert np.isnan(details.top_logprobs[0, VOCABULARY:]).all()
