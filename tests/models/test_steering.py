"""Penalties, masks, biases and details over the real model, held against naive sums in float64."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from tests.models.model_loop import ModelLoop, Output
from tests.models.tiny import VOCABULARY
from tests.simulation.hash_runner import CursedRunner
from tests.support import worker
from tests.support.models import open_model

from antiphon.model_worker.batching.state import Finish
from antiphon.wire.base import FinishReason
from antiphon.wire.codec import pack_ids, unpack_ids
from antiphon.wire.ids import RequestId
from antiphon.wire.sampling import (
    AllowRange,
    DisallowTokens,
    LogitBias,
    SamplingParams,
    ThinkingBudget,
    TokenOutputParams,
)
from antiphon.wire.token_outputs import pack_floats

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.models.conftest import Reference

    from antiphon.model_worker.batching.plan import PlanRunner
    from antiphon.model_worker.batching.state import RequestState
    from antiphon.wire.token_outputs import TokenOutput

RANDOM = np.random.default_rng(8)
PROMPTS = [RANDOM.integers(0, VOCABULARY, length).tolist() for length in (40, 11, 90, 3, 27, 61)]
END = 2
NEW_TOKENS = 24
DETAILS = TokenOutputParams(logprobs=True, top=3, named_ids=(5, 7), prompt_start=0)


def bias(values: dict[int, float]) -> LogitBias:
    return LogitBias(token_ids=pack_ids(values), values=pack_floats(values.values()))


def state(index: int, **fields: Any) -> RequestState:
    whole = {"max_new_tokens": NEW_TOKENS, "temperature": 0.0, "seed": index} | fields
    return worker.state(PROMPTS[index], request_id=RequestId(str(index)), **whole)


def loop_of(
    folder: Path,
    through: Callable[[PlanRunner], PlanRunner] = lambda runner: runner,
    *,
    chunk: int = 24,
    tree: bool = False,
    overlap: bool = False,
) -> ModelLoop:
    model = open_model(folder, pages=256, dtype="float32")
    return ModelLoop(
        model,
        through(model.runner),
        tree=tree,
        overlap=overlap,
        step_tokens_max=40,
        chunk_tokens=chunk,
        running_max=6,
        end_ids=frozenset({END}),
        hidden_states=True,
    )


def run(folder: Path, *states: RequestState, chunk: int = 24) -> list[Output]:
    """Run requests that arrive one a turn in a loop of their own."""
    return loop_of(folder, chunk=chunk).run(states, one_a_turn=True)


def steered(logits: np.ndarray, sampling: SamplingParams, outputs: Sequence[int]) -> np.ndarray:
    """One row of logits as the request wants it, token by token."""
    row = logits.astype(np.float64)
    for token, times in Counter(outputs).items():
        row[token] -= sampling.frequency_penalty * times + sampling.presence_penalty
        row[token] *= (
            1 / sampling.repetition_penalty if row[token] > 0 else sampling.repetition_penalty
        )
    for processor in sampling.processors:
        if isinstance(processor, DisallowTokens):
            row[list(processor.token_ids)] = -np.inf
        elif isinstance(processor, AllowRange):
            row[: processor.first] = row[processor.last + 1 :] = -np.inf
    if sampling.logit_bias is not None:
        ids = unpack_ids(sampling.logit_bias.token_ids)
        for token, value in zip(ids, np.frombuffer(sampling.logit_bias.values, "<f4"), strict=True):
            row[token] += value
    if len(outputs) < sampling.min_new_tokens:
        row[[END, *sampling.stop_token_ids]] = -np.inf
    return row


def log_softmax(row: np.ndarray) -> np.ndarray:
    top = row.max()
    return row - top - np.log(np.exp(row - top).sum())


def check_greedy(reference: Reference, one: RequestState, output: Output) -> None:
    """Each token has the highest steered logit, and no other one was the end."""
    prompt = list(unpack_ids(one.prompt_ids))
    logits = reference.logits(prompt + output.ids)[len(prompt) - 1 :].numpy()
    ended = output.finish.reason is FinishReason.STOP
    drawn = output.ids + ([output.finish.matched_stop] if ended else [])
    for number, token in enumerate(drawn):
        row = steered(logits[number], one.sampling, output.ids[:number])
        assert row[token] > row.max() - 1e-4, f"token {number}"


CASES: dict[str, dict[str, object]] = {
    "frequency": {"frequency_penalty": 0.7},
    "presence": {"presence_penalty": 1.9},
    "repetition": {"repetition_penalty": 1.4},
    "all penalties, two of them reversed": {
        "frequency_penalty": -0.2,
        "presence_penalty": -1.0,
        "repetition_penalty": 1.8,
    },
    "bias": {"logit_bias": bias({9: 8.0, 11: -3.5})},
    "min_new_tokens": {"min_new_tokens": 9, "logit_bias": bias({END: 50.0, 4: 1.0})},
    "stop ids": {"min_new_tokens": 3, "stop_token_ids": tuple(range(0, VOCABULARY, 9))},
    "disallowed": {"processors": (DisallowTokens(token_ids=tuple(range(0, 300, 2))),)},
    "a range": {"processors": (AllowRange(first=30, last=60),), "presence_penalty": 2.0},
}


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_the_highest_of_the_steered_logits(
    llama: Path, reference: Callable[[Path], Reference], case: str
) -> None:
    states = [state(index, **CASES[case]) for index in range(len(PROMPTS))]
    plain = run(llama, *(state(index) for index in range(len(PROMPTS))))
    outputs = run(llama, *states)
    for one, output in zip(states, outputs, strict=True):
        check_greedy(reference(llama), one, output)
    assert [o.ids for o in outputs] != [p.ids for p in plain], "the case shows nothing"


def mixed() -> list[RequestState]:
    """Every feature beside every other, some with chance, some reported, some plain."""
    return [
        state(0, frequency_penalty=0.5, temperature=0.9, top_p=0.95, details=DETAILS),
        state(1),
        state(
            2,
            repetition_penalty=1.3,
            presence_penalty=0.5,
            details=TokenOutputParams(logprobs=True),
        ),
        state(3, logit_bias=bias({9: 5.0}), temperature=1.3, min_p=0.02),
        state(4, min_new_tokens=20, processors=(DisallowTokens(token_ids=(1, 2, 3)),)),
        state(5, repetition_penalty=1.2, temperature=0.7, details=TokenOutputParams(hidden=True)),
    ]


@pytest.fixture(scope="module")
def alone(llama: Path) -> list[Output]:
    return [run(llama, one)[0] for one in mixed()]


def same(one: TokenOutput, other: TokenOutput) -> bool:
    """Equal but for what a sum over another batch may round."""
    return (
        one.token_id == other.token_id
        and [i for i, _ in one.top] == [i for i, _ in other.top]
        and np.allclose(one.logprob or 0.0, other.logprob or 0.0, atol=1e-4)
        and np.allclose([p for _, p in one.top], [p for _, p in other.top], atol=1e-4)
        and np.allclose(one.named, other.named, atol=1e-4)
        and np.allclose(one.hidden, other.hidden, atol=1e-3)
    )


@pytest.mark.parametrize("tree", [False, True], ids=["no tree", "tree"])
@pytest.mark.parametrize("chunk", [5, 24])
@pytest.mark.parametrize("retract_at", [(), (3, 9, 22, 51)], ids=["undisturbed", "retracted"])
def test_neighbours_chunks_caches_and_retractions_change_nothing(
    llama: Path, alone: list[Output], retract_at: tuple[int, ...], chunk: int, *, tree: bool
) -> None:
    loop = loop_of(llama, chunk=chunk, tree=tree)
    for _ in range(2):
        check_same(loop.run(mixed(), one_a_turn=True, retract_at=retract_at), alone)


def check_same(outputs: list[Output], alone: list[Output]) -> None:
    assert [o.ids for o in outputs] == [a.ids for a in alone]
    for one, other in zip(outputs, alone, strict=True):
        assert len(one.tokens) == len(other.tokens)
        assert all(map(same, one.tokens, other.tokens))


def test_steps_that_overlap_change_nothing(llama: Path, alone: list[Output]) -> None:
    """The next plan is made before the last token is known: what it changes is known in time."""
    loop = loop_of(llama, overlap=True)
    check_same(loop.run(mixed(), one_a_turn=True), alone)
    assert loop.futures > 0


def test_a_plan_that_is_run_again_counts_nothing_twice(llama: Path, alone: list[Output]) -> None:
    used = {token for ids in (*PROMPTS, *(one.ids for one in alone)) for token in ids}
    curse = min(set(range(VOCABULARY)) - used)
    loop = loop_of(llama, lambda runner: CursedRunner(runner, curse))
    cursed = msgspec.structs.replace(state(0), prompt_ids=pack_ids([1, curse]))
    *outputs, victim = loop.run([*mixed(), cursed], one_a_turn=True)
    check_same(outputs, alone)
    assert victim.finish.error is not None


def test_logprobs_are_those_of_the_steered_softmax(
    llama: Path, reference: Callable[[Path], Reference], alone: list[Output]
) -> None:
    for one, output in zip(mixed(), alone, strict=True):
        wanted, prompt = one.sampling.details, list(unpack_ids(one.prompt_ids))
        if wanted is None or not wanted.logprobs:
            continue
        entries = wanted.prompt_entries(len(prompt))
        assert len(output.tokens) == entries + len(output.ids)
        logits = reference(llama).logits(prompt + output.ids).numpy()
        for number, detail in enumerate(output.tokens):
            place = len(prompt) - entries + number  # of the token, in all of the sequence
            row = logits[place - 1].astype(np.float64)
            if place >= len(prompt):
                temperature = one.sampling.temperature or 1.0
                row = steered(row, one.sampling, output.ids[: place - len(prompt)]) / temperature
            expected = log_softmax(row)
            assert detail.token_id == (prompt + output.ids)[place]
            assert detail.logprob is not None
            np.testing.assert_allclose(detail.logprob, expected[detail.token_id], atol=2e-4)
            likeliest = np.sort(expected)[::-1][: wanted.top]
            np.testing.assert_allclose([p for _, p in detail.top], likeliest, atol=2e-4)
            for token, logprob in detail.top:
                np.testing.assert_allclose(logprob, expected[token], atol=2e-4)
            named = expected[list(wanted.named_ids)]
            np.testing.assert_allclose(detail.named, named, atol=2e-4)


def test_prompt_logprobs_begin_where_they_were_requested(llama: Path) -> None:
    (whole,) = run(llama, state(0, details=DETAILS))
    tail = TokenOutputParams(logprobs=True, top=3, named_ids=(5, 7), prompt_start=33)
    (part,) = run(llama, state(0, details=tail))
    assert len(whole.tokens) == len(PROMPTS[0]) - 1 + NEW_TOKENS
    assert len(part.tokens) == len(PROMPTS[0]) - 33 + NEW_TOKENS
    assert all(map(same, part.tokens, whole.tokens[32:]))


def test_prompt_tokens_in_the_cache_are_computed_again_for_their_logprobs(llama: Path) -> None:
    loop = loop_of(llama, tree=True)
    loop.run([state(0)])
    tail = TokenOutputParams(logprobs=True, prompt_start=30)
    (from_cache,) = loop.run([state(0, details=tail)])
    (afresh,) = run(llama, state(0, details=tail))
    assert all(map(same, from_cache.tokens, afresh.tokens))
    assert len(from_cache.tokens) == 10 + NEW_TOKENS


def test_a_request_of_no_new_tokens_has_logprobs_of_its_prompt_and_of_what_would_follow(
    llama: Path, reference: Callable[[Path], Reference]
) -> None:
    asked = TokenOutputParams(logprobs=True, top=2, named_ids=(5, 7), prompt_start=20)
    (output,) = run(llama, state(0, max_new_tokens=0, details=asked), chunk=9)
    assert output.ids == []
    assert output.finish == Finish(reason=FinishReason.LENGTH)
    *prompt, after = output.tokens
    assert [detail.token_id for detail in prompt] == PROMPTS[0][20:]
    expected = log_softmax(reference(llama).logits(PROMPTS[0])[-1].double().numpy())
    assert after.token_id == -1
    assert after.logprob is not None
    assert np.isnan(after.logprob)
    assert [token for token, _ in after.top] == np.argsort(-expected)[:2].tolist()
    np.testing.assert_allclose(after.named, expected[[5, 7]], atol=1e-4)


def test_hidden_states_are_those_that_the_tokens_follow_from(llama: Path) -> None:
    asked = TokenOutputParams(hidden=True, prompt_start=0)
    (output,) = run(llama, state(1, details=asked), chunk=7)
    assert len(output.tokens) == len(PROMPTS[1]) - 1 + NEW_TOKENS
    assert all(len(detail.hidden) == 48 for detail in output.tokens)
    (only_outputs,) = run(llama, state(1, details=TokenOutputParams(hidden=True)))
    assert all(map(same, only_outputs.tokens, output.tokens[len(PROMPTS[1]) - 1 :]))
    assert (output.tokens[0].logprob, output.tokens[0].top) == (None, ())


def test_a_token_that_ends_an_answer_has_no_logprob(llama: Path) -> None:
    ends = tuple(range(0, VOCABULARY, 3))
    (output,) = run(llama, state(0, stop_token_ids=ends, details=DETAILS, min_new_tokens=2))
    assert output.finish.matched_stop in ends
    assert len(output.tokens) == len(PROMPTS[0]) - 1 + len(output.ids)


def test_thinking_ends_when_its_budget_is_used_up(llama: Path) -> None:
    budget = ThinkingBudget(tokens_max=5, begin_id=50, closing_ids=(60, 61))
    begin = bias({50: 100.0})
    (output,) = run(llama, state(0, processors=(budget,), logit_bias=begin))
    # The bias begins the thinking at once, and begins it anew as soon as it has ended.
    assert output.ids[:9] == [50] * 6 + [60, 61, 50]


def test_what_a_request_forbids_altogether_ends_it_alone(llama: Path) -> None:
    nothing = (AllowRange(first=10, last=20), DisallowTokens(token_ids=tuple(range(10, 21))))
    barren, other = run(llama, state(0, processors=nothing), state(1))
    assert worker.error_of(barren.finish).code == "invalid_request"
    assert other.ids == run(llama, state(1))[0].ids


def test_an_answer_that_moves_to_another_worker_is_penalised_as_before(llama: Path) -> None:
    sampling = {"frequency_penalty": 0.6, "repetition_penalty": 1.3, "temperature": 0.8}
    whole = run(llama, state(2, **sampling))[0].ids
    for cut in (1, 7, 23):
        moved = state(2, output_ids=pack_ids(whole[:cut]), **sampling)
        assert run(llama, moved)[0].ids == whole[cut:]
