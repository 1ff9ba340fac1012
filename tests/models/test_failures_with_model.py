"""Steps of the real model that raise: who is not to blame says what it would have said."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.models.stepper import Stepper
from tests.models.test_batching_with_model import state
from tests.models.tiny import VOCABULARY, write_llama
from tests.simulation.hash_runner import ApartRunner, CursedRunner
from tests.support.models import open_model

from antiphon.model_worker.batching.engine_core import EngineCore
from antiphon.model_worker.batching.loop import BatchingLoop, StepReport
from antiphon.model_worker.batching.mailbox import Mail, Mailbox
from antiphon.model_worker.batching.state import ChoiceKey, EngineLimits, Finish, RequestState
from antiphon.model_worker.cache.pages import CachePools
from antiphon.model_worker.cache.radix import RadixIndex
from antiphon.model_worker.observability.recording import RecordingHeader, read, write
from antiphon.model_worker.observability.replay import replay
from antiphon.model_worker.runner.sampling import Sampler
from antiphon.wire.codec import pack_ids, unpack_ids
from antiphon.wire.sampling import SamplingParams

if TYPE_CHECKING:
    from pathlib import Path

    from antiphon.model_worker.batching.plan import Ints, PlanRunner
    from antiphon.model_worker.cache.groups import CacheGroup
    from antiphon.model_worker.observability.flight_recorder import StepRecord

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


def run(
    runner: PlanRunner,
    groups: tuple[CacheGroup, ...],
    states: list[RequestState],
    *,
    overlap: bool = False,
) -> tuple[list[list[int]], list[Finish | None], tuple[StepRecord, ...]]:
    """What each says and how it ends, all at once, and what was recorded."""
    pools = CachePools(groups)
    limits = EngineLimits(
        step_tokens_max=64,
        chunk_tokens=40,
        running_max=COUNT,
        context_tokens=200,
        vocab_size=VOCABULARY,
        end_ids=frozenset(),
        weights_digest="",
    )
    batching = EngineCore(limits, pools, RadixIndex(pools))
    texts: list[list[int]] = [[] for _ in states]
    ends: list[Finish | None] = [None for _ in states]

    def hear(report: StepReport) -> None:
        for news in report.progress:
            texts[news.key] += unpack_ids(news.token_ids)
            ends[news.key] = news.finish

    loop = BatchingLoop(batching, runner, Mailbox(1), hear, overlap=overlap)
    hear(loop.turn(Mail(runs={ChoiceKey(i): s for i, s in enumerate(states)})))
    while not batching.idle:
        hear(loop.turn(Mail()))
    hear(loop.turn(Mail()))  # reads what is still in flight
    batching.flush()
    assert pools.used() == [0]
    return texts, ends, loop.recorder.records()


@pytest.fixture(scope="module")
def undisturbed(llama: Path) -> list[list[int]]:
    model = open_model(llama, pages=256, dtype="float32")
    return run(model.runner, model.groups, requests(None))[0]


@pytest.mark.parametrize("culprit", range(COUNT))
def test_whoever_is_not_to_blame_says_the_same(
    llama: Path, undisturbed: list[list[int]], culprit: int
) -> None:
    model = open_model(llama, pages=256, dtype="float32")
    cursed = CursedRunner(model.runner, CURSE)
    texts, ends, _ = run(cursed, model.groups, requests(culprit))
    assert cursed.raised > 1
    for index in range(COUNT):
        end = ends[index]
        assert end is not None
        if index == culprit:
            assert end.error is not None
            assert not texts[index]
        else:
            assert end.error is None
            assert texts[index] == undisturbed[index]


@pytest.mark.parametrize("culprit", [None, 0, 3])
def test_steps_that_are_launched_ahead_say_the_same(
    llama: Path, undisturbed: list[list[int]], culprit: int | None
) -> None:
    model = open_model(llama, pages=256, dtype="float32")
    apart = ApartRunner(CursedRunner(model.runner, CURSE), resolves=False)
    texts, ends, _ = run(apart, model.groups, requests(culprit), overlap=True)
    apart.close()
    assert apart.futures > COUNT
    for index in range(COUNT):
        end = ends[index]
        assert end is not None
        assert (end.error is not None) == (index == culprit)
        assert texts[index] == ([] if index == culprit else undisturbed[index])


def test_a_step_that_raises_leaves_no_number_behind(llama: Path) -> None:
    class NoToken(Exception):
        pass

    class Raises(Sampler):
        def sample(self, *_: Any, **__: Any) -> Ints:
            raise NoToken

    model = open_model(llama, pages=256, dtype="float32")
    model.runner._sampler = Raises(model.runner.ops)
    batch = Stepper(model.runner, model.groups)
    batch.add(range(20)).temperature = 1.0
    with pytest.raises(NoToken):
        batch.prefill()
    assert not any(pool._data.any() for pool in model.runner.pools)


def test_a_recording_of_the_model_is_replayed_from_its_file(llama: Path, tmp_path: Path) -> None:
    model = open_model(llama, pages=256, dtype="float32")
    records = run(model.runner, model.groups, requests(None))[2]
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
    fresh = open_model(llama, pages=256, dtype="float32")
    result = replay(found.records, found.header.groups, fresh.runner)
    assert result.difference is None
    assert (result.passed, result.plans) == (0, len(records))

    fresh = open_model(llama, pages=256, dtype="float32")
    result = replay(found.records[3:], found.header.groups, fresh.runner)
    assert result.difference is None
    assert result.passed > 0


def test_a_recording_of_another_model_differs(llama: Path, tmp_path: Path) -> None:
    other = write_llama(tmp_path / "other", seed=1)
    one, two = (open_model(f, pages=256, dtype="float32") for f in (llama, other))
    records = run(one.runner, one.groups, requests(None))[2]
    result = replay(records, one.groups, two.runner)
    assert result.difference is not None
    assert result.difference.step == 1
