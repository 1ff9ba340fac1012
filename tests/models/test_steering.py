"""Penalties, masks, biases and details over the real model, held against naive sums in float64."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from tests.models.tiny import VOCABULARY
from tests.simulation.hash_runner import ApartRunner, CursedRunner
from tests.support.models import open_model

from antiphon.model_worker.batching.engine_core import EngineCore
from antiphon.model_worker.batching.loop import BatchingLoop, StepReport
from antiphon.model_worker.batching.mailbox import Mail, Mailbox
from antiphon.model_worker.batching.state import ChoiceKey, EngineLimits, Finish, RequestState
from antiphon.model_worker.cache.pages import CachePools
from antiphon.model_worker.cache.radix import RadixIndex
from antiphon.wire.base import FinishReason
from antiphon.wire.codec import pack_ids, unpack_ids
from antiphon.wire.command import PauseMode
from antiphon.wire.ids import RequestId
from antiphon.wire.sampling import (
    AllowRange,
    DisallowTokens,
    LogitBias,
    SamplingParams,
    ThinkingBudget,
    TokenOutputParams,
)
from antiphon.wire.token_outputs import TokenOutput, pack_floats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from tests.models.conftest import Reference

    from antiphon.model_worker.batching.plan import PlanRunner

RANDOM = np.random.default_rng(8)
PROMPTS = [RANDOM.integers(0, VOCABULARY, length).tolist() for length in (40, 11, 90, 3, 27, 61)]
END = 2
NEW_TOKENS = 24
TELL = TokenOutputParams(logprobs=True, top=3, named_ids=(5, 7), prompt_start=0)


@dataclass
class Heard:
    """What a request was told."""

    ids: list[int] = field(default_factory=list[int])
    details: list[TokenOutput] = field(default_factory=list[TokenOutput])
    finish: Finish | None = None


def bias(values: dict[int, float]) -> LogitBias:
    return LogitBias(token_ids=pack_ids(values), values=pack_floats(values.values()))


def state(index: int, **sampling: Any) -> RequestState:
    fields = {"max_new_tokens": NEW_TOKENS, "temperature": 0.0, "seed": index} | sampling
    return RequestState(
        request_id=RequestId(str(index)),
        choice=0,
        prompt_ids=pack_ids(PROMPTS[index]),
        sampling=SamplingParams(**fields),
        deadline_unix_ms=2**52,
    )


class World:
    """A worker's loop over the tiny model."""

    def __init__(
        self,
        folder: Path,
        *,
        chunk: int = 24,
        tree: bool = False,
        through: Callable[[PlanRunner], PlanRunner] = lambda runner: runner,
        overlap: bool = False,
    ) -> None:
        model = open_model(folder, pages=256, dtype="float32")
        self.pools = CachePools(model.groups)
        limits = EngineLimits(
            step_tokens_max=40,
            chunk_tokens=chunk,
            running_max=6,
            context_tokens=256,
            vocab_size=VOCABULARY,
            end_ids=frozenset({END}),
            weights_digest="",
            hidden_states=True,
        )
        index = RadixIndex(self.pools) if tree else None
        self.batching = EngineCore(limits, self.pools, index)
        self.heard: dict[int, Heard] = {}
        self.numbers = count()
        runner = through(model.runner)
        self.loop = BatchingLoop(self.batching, runner, Mailbox(1), self.hear, overlap=overlap)

    def hear(self, report: StepReport) -> None:
        for progress in report.progress:
            heard = self.heard.setdefault(progress.key, Heard())
            heard.ids += unpack_ids(progress.token_ids)
            heard.details += progress.details.iter_tokens() if progress.details.count else ()
            heard.finish = progress.finish

    def run(self, states: Iterable[RequestState], retract_at: Sequence[int] = ()) -> list[Heard]:
        """Run requests that arrive one a turn; what each heard, in their order.

        In the turns `retract_at` all that run lose their slots and pages.
        """
        keys: list[ChoiceKey] = []
        for one in states:
            keys.append(ChoiceKey(next(self.numbers)))
            self.hear(self.loop.turn(Mail(runs={keys[-1]: one})))
        for turn in range(3000):
            if self.batching.idle:
                return [self.heard[key] for key in keys]
            if turn in retract_at:
                self.batching.prepare_pause(PauseMode.RETRACT)
            self.hear(self.loop.turn(Mail()))
        raise AssertionError("the loop does not come to an end")


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


def check_greedy(reference: Reference, one: RequestState, heard: Heard) -> None:
    """Each token has the highest steered logit, and no other one was the end."""
    prompt = list(unpack_ids(one.prompt_ids))
    logits = reference.logits(prompt + heard.ids)[len(prompt) - 1 :].numpy()
    ended = heard.finish is not None and heard.finish.reason is FinishReason.STOP
    drawn = heard.ids + ([heard.finish.matched_stop] if heard.finish and ended else [])
    for number, token in enumerate(drawn):
        row = steered(logits[number], one.sampling, heard.ids[:number])
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
    plain = World(llama).run(state(index) for index in range(len(PROMPTS)))
    heard = World(llama).run(states)
    for one, said in zip(states, heard, strict=True):
        check_greedy(reference(llama), one, said)
    assert [h.ids for h in heard] != [p.ids for p in plain], "the case shows nothing"


def mixed() -> list[RequestState]:
    """Every feature beside every other, some with chance, some told of, some plain."""
    return [
        state(0, frequency_penalty=0.5, temperature=0.9, top_p=0.95, details=TELL),
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
def alone(llama: Path) -> list[Heard]:
    return [World(llama).run([one])[0] for one in mixed()]


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
    llama: Path, alone: list[Heard], retract_at: tuple[int, ...], chunk: int, *, tree: bool
) -> None:
    world = World(llama, chunk=chunk, tree=tree)
    for _ in range(2):
        check_same(world.run(mixed(), retract_at), alone)


def check_same(heard: list[Heard], alone: list[Heard]) -> None:
    assert [h.ids for h in heard] == [a.ids for a in alone]
    for one, other in zip(heard, alone, strict=True):
        assert len(one.details) == len(other.details)
        assert all(map(same, one.details, other.details))


def test_steps_that_overlap_change_nothing(llama: Path, alone: list[Heard]) -> None:
    """The next plan is made before the last token is known: what it changes is known in time."""
    apart: list[ApartRunner] = []

    def through(runner: PlanRunner) -> PlanRunner:
        apart.append(ApartRunner(runner, resolves=False))
        return apart[0]

    check_same(World(llama, through=through, overlap=True).run(mixed()), alone)
    assert apart[0].held_max == 2
    assert apart[0].futures > 0
    apart[0].close()


def test_a_plan_that_is_run_again_counts_nothing_twice(llama: Path, alone: list[Heard]) -> None:
    used = {token for ids in (*PROMPTS, *(one.ids for one in alone)) for token in ids}
    curse = min(set(range(VOCABULARY)) - used)
    world = World(llama, through=lambda runner: CursedRunner(runner, curse))
    cursed = msgspec.structs.replace(state(0), prompt_ids=pack_ids([1, curse]))
    *heard, victim = world.run([*mixed(), cursed])
    check_same(heard, alone)
    assert victim.finish is not None
    assert victim.finish.error is not None


def test_logprobs_are_those_of_the_steered_softmax(
    llama: Path, reference: Callable[[Path], Reference], alone: list[Heard]
) -> None:
    for one, heard in zip(mixed(), alone, strict=True):
        wanted, prompt = one.sampling.details, list(unpack_ids(one.prompt_ids))
        if wanted is None or not wanted.logprobs:
            continue
        entries = wanted.prompt_entries(len(prompt))
        assert len(heard.details) == entries + len(heard.ids)
        logits = reference(llama).logits(prompt + heard.ids).numpy()
        for number, detail in enumerate(heard.details):
            place = len(prompt) - entries + number  # of the token, in all of the sequence
            row = logits[place - 1].astype(np.float64)
            if place >= len(prompt):
                temperature = one.sampling.temperature or 1.0
                row = steered(row, one.sampling, heard.ids[: place - len(prompt)]) / temperature
            expected = log_softmax(row)
            assert detail.token_id == (prompt + heard.ids)[place]
            assert detail.logprob is not None
            np.testing.assert_allclose(detail.logprob, expected[detail.token_id], atol=2e-4)
            likeliest = np.sort(expected)[::-1][: wanted.top]
            np.testing.assert_allclose([p for _, p in detail.top], likeliest, atol=2e-4)
            for token, logprob in detail.top:
                np.testing.assert_allclose(logprob, expected[token], atol=2e-4)
            named = expected[list(wanted.named_ids)]
            np.testing.assert_allclose(detail.named, named, atol=2e-4)


def test_a_prompt_is_told_of_from_where_it_was_asked_for(llama: Path) -> None:
    whole = World(llama).run([state(0, details=TELL)])[0]
    tail = TokenOutputParams(logprobs=True, top=3, named_ids=(5, 7), prompt_start=33)
    part = World(llama).run([state(0, details=tail)])[0]
    assert len(whole.details) == len(PROMPTS[0]) - 1 + NEW_TOKENS
    assert len(part.details) == len(PROMPTS[0]) - 33 + NEW_TOKENS
    assert all(map(same, part.details, whole.details[32:]))


def test_prompt_tokens_in_the_cache_are_computed_again_where_they_are_told_of(llama: Path) -> None:
    world = World(llama, tree=True)
    world.run([state(0)])
    tail = TokenOutputParams(logprobs=True, prompt_start=30)
    from_cache = world.run([state(0, details=tail)])[0]
    afresh = World(llama).run([state(0, details=tail)])[0]
    assert all(map(same, from_cache.details, afresh.details))
    assert len(from_cache.details) == 10 + NEW_TOKENS


def test_a_request_of_no_new_tokens_is_told_of_its_prompt_and_of_what_would_follow(
    llama: Path, reference: Callable[[Path], Reference]
) -> None:
    asked = TokenOutputParams(logprobs=True, top=2, named_ids=(5, 7), prompt_start=20)
    [heard] = World(llama, chunk=9).run([state(0, max_new_tokens=0, details=asked)])
    assert heard.ids == []
    assert heard.finish == Finish(reason=FinishReason.LENGTH)
    *prompt, after = heard.details
    assert [detail.token_id for detail in prompt] == PROMPTS[0][20:]
    expected = log_softmax(reference(llama).logits(PROMPTS[0])[-1].double().numpy())
    assert after.token_id == -1
    assert after.logprob is not None
    assert np.isnan(after.logprob)
    assert [token for token, _ in after.top] == np.argsort(-expected)[:2].tolist()
    np.testing.assert_allclose(after.named, expected[[5, 7]], atol=1e-4)


def test_hidden_states_are_those_that_the_tokens_follow_from(llama: Path) -> None:
    asked = TokenOutputParams(hidden=True, prompt_start=0)
    [heard] = World(llama, chunk=7).run([state(1, details=asked)])
    assert len(heard.details) == len(PROMPTS[1]) - 1 + NEW_TOKENS
    assert all(len(detail.hidden) == 48 for detail in heard.details)
    only_outputs = World(llama).run([state(1, details=TokenOutputParams(hidden=True))])[0]
    assert all(map(same, only_outputs.details, heard.details[len(PROMPTS[1]) - 1 :]))
    assert heard.details[0].logprob is None
    assert heard.details[0].top == ()


def test_a_token_that_ends_an_answer_is_not_told_of(llama: Path) -> None:
    ends = tuple(range(0, VOCABULARY, 3))
    [heard] = World(llama).run([state(0, stop_token_ids=ends, details=TELL, min_new_tokens=2)])
    assert heard.finish is not None
    assert heard.finish.matched_stop in ends
    assert len(heard.details) == len(PROMPTS[0]) - 1 + len(heard.ids)


def test_thinking_ends_when_its_budget_is_used_up(llama: Path) -> None:
    budget = ThinkingBudget(tokens_max=5, begin_id=50, closing_ids=(60, 61))
    begin = bias({50: 100.0})
    one = state(0, processors=(budget,), logit_bias=begin)
    heard = World(llama).run([one])[0].ids
    # The bias begins the thinking at once, and begins it anew as soon as it has ended.
    assert heard[:9] == [50] * 6 + [60, 61, 50]


def test_what_a_request_forbids_altogether_ends_it_alone(llama: Path) -> None:
    nothing = (AllowRange(first=10, last=20), DisallowTokens(token_ids=tuple(range(10, 21))))
    barren, other = World(llama).run([state(0, processors=nothing), state(1)])
    assert barren.finish is not None
    assert barren.finish.error is not None
    assert barren.finish.error.code == "invalid_request"
    assert other.ids == World(llama).run([state(1)])[0].ids


def test_an_answer_that_moves_to_another_worker_is_penalised_as_before(llama: Path) -> None:
    sampling = {"frequency_penalty": 0.6, "repetition_penalty": 1.3, "temperature": 0.8}
    whole = World(llama).run([state(2, **sampling)])[0].ids
    for cut in (1, 7, 23):
        begun = state(2, **sampling)
        moved = RequestState(
            request_id=begun.request_id,
            choice=0,
            prompt_ids=begun.prompt_ids,
            output_ids=pack_ids(whole[:cut]),
            emitted=cut,
            sampling=begun.sampling,
            deadline_unix_ms=begun.deadline_unix_ms,
        )
        assert World(llama).run([moved])[0].ids == whole[cut:]
