"""Steps of the real model that raise end one request, and leave no trace in the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.models.model_loop import ModelLoop, Output
from tests.models.stepper import Stepper
from tests.models.test_batching_with_model import state
from tests.models.tiny import VOCABULARY, write_llama
from tests.simulation.hash_runner import CursedRunner
from tests.support.models import open_model
from tests.unit.model_worker.test_recorder import last_records

from antiphon.model_worker.observability.recording import RecordingHeader, read, write
from antiphon.model_worker.observability.replay import replay
from antiphon.model_worker.runner.sampling import Sampler
from antiphon.wire.codec import pack_ids, unpack_ids
from antiphon.wire.sampling import SamplingParams

if TYPE_CHECKING:
    from pathlib import Path

    from antiphon.model_worker.batching.plan import Ints, PlanRunner
    from antiphon.model_worker.batching.state import RequestState
    from antiphon.model_worker.observability.flight_recorder import StepRecord
    from antiphon.model_worker.runner.opening import OpenModel

CURSE = VOCABULARY - 1
COUNT = 5
SAMPLING = SamplingParams(max_new_tokens=12, temperature=0.0)
PENALISED = SamplingParams(
    max_new_tokens=12, temperature=0.8, seed=3, frequency_penalty=0.7, repetition_penalty=1.3
)


def requests(culprit: int | None) -> list[RequestState]:
    """Some prompts, one of which ends with the curse; every second one has penalties."""
    states: list[RequestState] = []
    for index in range(COUNT):
        plain = state(index)
        ids = [id_ % CURSE for id_ in unpack_ids(plain.prompt_ids)]
        if index == culprit:
            ids[-1] = CURSE
        sampling = PENALISED if index % 2 else SAMPLING
        states.append(msgspec.structs.replace(plain, prompt_ids=pack_ids(ids), sampling=sampling))
    return states


def opened(folder: Path) -> OpenModel:
    return open_model(folder, pages=256, dtype="float32")


def run(
    model: OpenModel,
    states: list[RequestState],
    runner: PlanRunner | None = None,
    *,
    overlap: bool = False,
) -> tuple[list[Output], tuple[StepRecord, ...]]:
    """The outputs of requests that arrive at once, and what was recorded."""
    limits: dict[str, Any] = {"step_tokens_max": 64, "chunk_tokens": 40, "running_max": COUNT}
    loop = ModelLoop(model, runner, tree=True, overlap=overlap, **limits)
    outputs = loop.run(states)
    loop.core.flush()
    assert loop.pools.used() == [0]
    return outputs, loop.loop.recorder.records()


@pytest.fixture(scope="module")
def undisturbed(llama: Path) -> list[list[int]]:
    return [output.ids for output in run(opened(llama), requests(None))[0]]


def check_outputs(outputs: list[Output], undisturbed: list[list[int]], culprit: int | None) -> None:
    """Only the culprit fails, before its first token; the others are undisturbed."""
    for index, output in enumerate(outputs):
        assert (output.finish.error is not None) == (index == culprit)
        assert output.ids == ([] if index == culprit else undisturbed[index])


@pytest.mark.parametrize("culprit", range(COUNT))
def test_requests_beside_a_failing_one_are_undisturbed(
    llama: Path, undisturbed: list[list[int]], culprit: int
) -> None:
    model = opened(llama)
    cursed = CursedRunner(model.runner, CURSE)
    check_outputs(run(model, requests(culprit), cursed)[0], undisturbed, culprit)
    assert cursed.raised > 1


@pytest.mark.parametrize("culprit", [None, 0, 3])
def test_steps_that_are_launched_ahead_are_undisturbed(
    llama: Path, undisturbed: list[list[int]], culprit: int | None
) -> None:
    model = opened(llama)
    cursed = CursedRunner(model.runner, CURSE)
    outputs, records = run(model, requests(culprit), cursed, overlap=True)
    assert sum((record.plan.tokens < 0).sum() for record in records) > COUNT
    check_outputs(outputs, undisturbed, culprit)


def test_a_step_that_raises_leaves_no_number_behind(llama: Path) -> None:
    class NoToken(Exception):
        pass

    class Raises(Sampler):
        def sample(self, *_: Any, **__: Any) -> Ints:
            raise NoToken

    model = opened(llama)
    model.runner._sampler = Raises(model.runner.ops)
    batch = Stepper(model.runner, model.groups)
    batch.add(range(20)).temperature = 1.0
    with pytest.raises(NoToken):
        batch.prefill()
    assert not any(pool.memory.data.any() for pool in model.runner.pools)


def test_a_recording_of_the_model_is_replayed_from_its_file(llama: Path, tmp_path: Path) -> None:
    model = opened(llama)
    _, records = run(model, requests(None))
    header = RecordingHeader(
        reason="test",
        unix_ms=1,
        instance="w",
        weights_digest="",
        weight_version="default",
        groups=model.groups,
        resolved=None,
    )
    found = read(write(tmp_path, header, records))
    whole = replay(found.records, found.header.groups, opened(llama).runner)
    assert (whole.difference, whole.passed, whole.plans) == (None, 0, len(records))
    later = last_records(found.records, model.groups, len(records) - 3)
    part = replay(later, model.groups, opened(llama).runner)
    assert part.difference is None
    assert part.passed > 0


def test_a_recording_of_another_model_differs(llama: Path, tmp_path: Path) -> None:
    other = write_llama(tmp_path / "other", seed=1)
    model = opened(llama)
    _, records = run(model, requests(None))
    result = replay(records, model.groups, opened(other).runner)
    assert result.difference is not None
    assert result.difference.step == 1
