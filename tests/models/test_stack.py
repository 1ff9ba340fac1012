"""Which models and passes run as one call for all layers, and that it changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
import torch
from tests.kernels.rows import ISAS
from tests.models.parity import save
from tests.models.specs import BY_NAME, ROWS
from tests.models.stepper import Stepper, spy_on_logits
from tests.models.tiny import VOCABULARY, write_llama, write_qwen2
from tests.support.models import load
from torch import Tensor

from antiphon.kernels.op import table
from antiphon.model_worker.batching.plan import Ints, RowStatus
from antiphon.model_worker.runner.input_batch import PlanRefused
from antiphon.model_worker.runner.model_runner import ModelRunner
from antiphon.model_worker.runner.pools import cache_groups

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from antiphon.kernels.cpu.fused_decoder import FusedDecoderOutput

pytestmark = pytest.mark.skipif(not ISAS, reason="the CPU's own kernels are not built")

RANDOM = np.random.default_rng(9)
PROMPTS = [RANDOM.integers(0, VOCABULARY, length).tolist() for length in (3, 50, 17, 90)]
SHAPES = {
    "grouped queries": {},
    "one kv head": {"num_key_value_heads": 1},
    "biases everywhere": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
}


def runner_of(
    folder: Path, *, linear: str = "packed", dtype: str = "bfloat16", **said
) -> ModelRunner:
    model = load(folder, dtype=dtype, linear=linear)
    groups = cache_groups(model.spec, model.build, page_tokens=4, pages=256, states=128)
    return ModelRunner(model, groups, **said)


def stepper_of(runner: ModelRunner) -> Stepper:
    return Stepper(runner, [pool.group for pool in (*runner.pools, *runner.states)])


def written(runner: ModelRunner) -> tuple[list[list[int]], list[Tensor]]:
    """Some requests in chunks and then side by side: what they say, and all logits."""
    seen = spy_on_logits(runner)
    batch = stepper_of(runner)
    for ids in PROMPTS:
        batch.add([token % runner._model.spec.vocabulary for token in ids])
    batch.prefill(20)
    batch.decode(12)
    return [line.ids for line in batch.lines.values()], seen


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("fields", SHAPES.values(), ids=list(SHAPES))
def test_a_stack_has_the_bits_of_its_layers(tmp_path: Path, dtype: str, fields) -> None:
    folder = write_llama(tmp_path, fields)
    together = runner_of(folder, dtype=dtype)
    apart = runner_of(folder, dtype=dtype, fused=False)
    assert [runner.choices[0].backend for runner in (together, apart)] == ["cpu", "by layer"]
    ids, logits = written(together)
    expected_ids, expected = written(apart)
    assert ids == expected_ids
    assert len(logits) == len(expected)
    assert all(map(torch.equal, logits, expected))


APART = {
    "gemma3n": "the fused decoder has one residual stream",
    "gemma3n as published": "the fused decoder has one residual stream",
    "gemma3n with two streams of which the second is active": "the fused decoder has one residual",
    "gemma4": "the fused decoder has no per-layer inputs",
    "gemma4 with experts and values that are keys": "the fused decoder has no second feed-forward",
}
"""Rows that run layer by layer, and why."""


FUSED = [
    pytest.param(row.name, marks=[pytest.mark.long] if row.again else [])
    for row in ROWS
    if row.name not in APART
]
"""Those that have the text model of another row only in a long run."""


@pytest.fixture(scope="module", params=FUSED)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(BY_NAME[request.param], tmp_path_factory.mktemp("family")).folder


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_stack_of_any_family_has_the_bits_of_its_layers(family: Path, dtype: str) -> None:
    together = runner_of(family, dtype=dtype)
    apart = runner_of(family, dtype=dtype, fused=False)
    assert [runner.choices[0].backend for runner in (together, apart)] == ["cpu", "by layer"]
    assert together._contexts._stack is not None
    assert together._contexts._stack.scores
    ids, logits = written(together)
    expected_ids, expected = written(apart)
    assert ids == expected_ids
    assert len(logits) == len(expected)
    assert all(map(torch.equal, logits, expected))


@pytest.mark.parametrize(("name", "reason"), APART.items())
def test_what_no_stack_has_runs_layer_by_layer(tmp_path: Path, name: str, reason: str) -> None:
    (refused,) = runner_of(save(BY_NAME[name], tmp_path).folder).choices[0].refused
    assert refused[1].startswith(reason)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"linear": "plain"}, "the linears are not packed"),
        ({"fused": False}, "the fused decoder is disabled"),
        ({"forced": {"attention.paged": "torch"}}, "attention.paged runs on torch"),
        ({"dtype": "float16", "linear": "plain"}, "norm.rmsnorm runs on torch"),
    ],
    ids=["plain linears", "kept apart", "a forced operation", "float16"],
)
def test_the_table_gives_the_reason_why_layers_run_one_by_one(
    llama: Path, said, reason: str
) -> None:
    shown = table(runner_of(llama, **said).choices).splitlines()[0]
    assert shown.startswith("decoder.stack")
    assert f"not cpu: {reason}" in shown


WINDOWS = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}


def windowed(folder: Path, **said) -> ModelRunner:
    """A runner of a model whose upper two layers have windows, and pages of their own."""
    return runner_of(write_qwen2(folder, WINDOWS), **said)


def spy_on_going_on(runner: ModelRunner) -> list[bool]:
    """Of each time that the stack was asked to go on, whether it did."""
    stack, seen = runner._contexts._stack, list[bool]()
    assert stack is not None
    again = stack.decode_next

    def spy(
        ids: Ints, tables: tuple[Ints, ...], argmax_only: bool = False
    ) -> FusedDecoderOutput | None:
        scored = again(ids, tables, argmax_only)
        seen.append(scored is not None)
        return scored

    stack.decode_next = spy
    return seen


def two_steppers(runners: Sequence[ModelRunner], temperatures: Sequence[float]) -> list[Stepper]:
    """The same requests before two runners, of which only the first continues a decode step."""
    steppers: list[Stepper] = []
    for runner in runners:
        stepper = stepper_of(runner)
        if runner is not runners[0]:
            runner._contexts._may_continue = False
        for seed, (ids, temperature) in enumerate(zip(PROMPTS, temperatures, strict=True)):
            line = stepper.add(ids)
            line.temperature, line.seed = temperature, seed
        steppers.append(stepper)
    return steppers


def said_by(stepper: Stepper) -> list[tuple[list[int], list[int]]]:
    return [(line.ids, line.statuses) for line in stepper.lines.values()]


@pytest.mark.parametrize("as_future", [False, True], ids=["", "futures"])
@pytest.mark.parametrize("temperatures", [[0.0] * 4, [0.0, 0.9, 0.0, 1.1], [1.0] * 4], ids=str)
def test_decode_steps_that_continue_another_give_what_they_give_by_themselves(
    tmp_path: Path, temperatures: list[float], as_future: bool
) -> None:
    runners = windowed(tmp_path), windowed(tmp_path)
    logits = [spy_on_logits(runner) for runner in runners]
    gone_on = spy_on_going_on(runners[0])
    steppers = two_steppers(runners, temperatures)
    for stepper in steppers:
        stepper.prefill(20)
        stepper.decode(12, as_future=as_future)
        stepper.step({0: 1, 2: 1})  # two leave
        for _ in range(6):
            stepper.step({0: 1, 2: 1}, as_future=as_future)
    assert gone_on == [True] * 17
    assert said_by(steppers[0]) == said_by(steppers[1])
    assert all(map(torch.equal, *logits))


@pytest.mark.parametrize("said", [{"fused": False}, {"deterministic": True}, {"linear": "plain"}])
def test_any_runner_takes_decode_steps_that_follow_each_other(tmp_path: Path, said) -> None:
    steppers = two_steppers([windowed(tmp_path, **said) for _ in range(2)], [0.0] * 4)
    for stepper in steppers:
        stepper.prefill()
        stepper.decode(9)
    assert said_by(steppers[0]) == said_by(steppers[1])


def test_a_decode_step_goes_beyond_the_angles_that_were_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("antiphon.kernels.rotary._POSITIONS_MIN", 8)
    runners = windowed(tmp_path), windowed(tmp_path)
    gone_on = spy_on_going_on(runners[0])
    steppers = two_steppers(runners, [0.0] * 4)
    for stepper in steppers:
        stepper.prefill()  # of 90 tokens the longest: angles of 128 are known
        stepper.decode(45)
    assert gone_on.count(False) == 1
    assert said_by(steppers[0]) == said_by(steppers[1])


class Curse:
    """Makes a runner raise in the middle of its next pass, after its layers or in place of them."""

    def __init__(self, runner: ModelRunner, *, early: bool) -> None:
        self._runner = runner
        self._part = runner._contexts if early else runner._sampler
        self._name = "score" if early else "sample"

    def __enter__(self) -> None:
        setattr(self._part, self._name, self._fail)

    def __exit__(self, *_: object) -> None:
        delattr(self._part, self._name)

    def _fail(self, *_: object, **__: object) -> None:
        raise RuntimeError("cursed")


@pytest.mark.parametrize("early", [False, True], ids=["after its layers", "before its layers"])
def test_a_decode_step_may_follow_one_that_failed(tmp_path: Path, early: bool) -> None:
    runners = windowed(tmp_path), windowed(tmp_path)
    gone_on = spy_on_going_on(runners[0])
    steppers = two_steppers(runners, [1.0] * 4)
    for runner, stepper in zip(runners, steppers, strict=True):
        stepper.prefill()
        stepper.decode(5)
        with Curse(runner, early=early), pytest.raises(RuntimeError, match="cursed"):
            stepper.decode(1)
        for line in stepper.lines.values():  # as if it had been known what they would draw
            line.ids.append(7)
            line.computed += 1
        stepper.decode(5)
    assert gone_on == [True] * (4 if early else 5) + [True] * 4
    assert said_by(steppers[0]) == said_by(steppers[1])


def test_a_decode_step_may_follow_one_that_was_refused(tmp_path: Path) -> None:
    runners = windowed(tmp_path), windowed(tmp_path)
    gone_on = spy_on_going_on(runners[0])
    steppers = two_steppers(runners, [0.0] * 4)
    for runner, stepper in zip(runners, steppers, strict=True):
        stepper.prefill()
        stepper.decode(3)
        last = stepper.plans[-1]
        drafts = np.ones(len(last.slot), np.int32)  # it has no draft model
        refused = msgspec.structs.replace(last, step=last.step + 1, draft_counts=drafts)
        for plan in (refused, msgspec.structs.replace(refused, step=last.step + 7)):
            with pytest.raises(PlanRefused):
                runner.run(plan)
        stepper.plans.append(refused)
        stepper.decode(3)
    assert gone_on == [True] * 5, "nothing was computed in between"
    assert said_by(steppers[0]) == said_by(steppers[1])


def test_a_decode_step_of_other_sequences_continues_one_of_these_lengths(tmp_path: Path) -> None:
    runners = windowed(tmp_path), windowed(tmp_path)
    runners[1]._contexts._may_continue = False
    logits = [spy_on_logits(runner) for runner in runners]
    gone_on = spy_on_going_on(runners[0])
    steppers = [stepper_of(runner) for runner in runners]
    for stepper in steppers:
        for length in (3, 50, 4, 51):
            stepper.add(PROMPTS[3][-length:])
        stepper.prefill()
        for _ in range(6):
            stepper.step({0: 1, 1: 1})
            stepper.step({2: 1, 3: 1})
    assert gone_on == [True] * 6
    assert said_by(steppers[0]) == said_by(steppers[1])
    assert all(map(torch.equal, *logits))


def test_plans_may_begin_with_a_decode_step(tmp_path: Path) -> None:
    stepper, _ = two_steppers([windowed(tmp_path), windowed(tmp_path)], [0.0, 0.9, 0.0, 1.1])
    stepper.prefill()
    stepper.decode(9)
    one, other = windowed(tmp_path), windowed(tmp_path)
    other._contexts._may_continue = False
    gone_on = spy_on_going_on(one)
    for plan in stepper.plans[-6:]:
        assert one.run(plan).token_ids.tolist() == other.run(plan).token_ids.tolist()
    assert gone_on == [True] * 5


def test_a_row_that_is_not_finite_is_reported_by_the_stack(llama: Path) -> None:
    runner = runner_of(llama)
    embedding = runner._model.own_decoder.embedding
    assert embedding is not None
    assert embedding.table is not None
    poison = PROMPTS[1][2]
    embedding.table[poison] = torch.nan
    batch = stepper_of(runner)
    for ids in PROMPTS[:3]:
        batch.add([token if token != poison or ids is PROMPTS[1] else 0 for token in ids])
    batch.step({0: 3, 1: 40, 2: 17})
    assert [line.statuses for line in batch.lines.values()] == [
        [RowStatus.OK],
        [RowStatus.NON_FINITE],
        [RowStatus.OK],
    ]
