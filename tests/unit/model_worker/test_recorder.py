"""What the recorder keeps, how it is written, and what a replay finds."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
from tests.models.tiny import write_llama
from tests.simulation.hash_runner import HashRunner
from tests.simulation.test_worker_overlap import CURSE, VOCAB_SIZE, Stage, harmless, staged
from tests.support.worker import page_group, penalties
from tests.unit.model_worker.test_opening import SMALL

from antiphon.cli.commands import replay as replay_command
from antiphon.model_worker.batching.flights import InTurn
from antiphon.model_worker.batching.loop import BatchingLoop
from antiphon.model_worker.batching.mailbox import Mailbox
from antiphon.model_worker.batching.plan import Biases, SamplingPart, StepOutcome, StepPlan
from antiphon.model_worker.observability.flight_recorder import FlightRecorder, StepRecord, summary
from antiphon.model_worker.observability.recording import (
    FILES_MAX,
    PlanDumps,
    RecordingBroken,
    RecordingHeader,
    read,
    write,
)
from antiphon.model_worker.observability.replay import (
    CANNOT_RUN,
    DIFFERENT,
    SAME,
    ReplayResult,
    main,
    replay,
)
from antiphon.model_worker.startup.engine import open_engine
from antiphon.model_worker.startup.warm_up import warm_up
from antiphon.service.clock import SystemClock
from antiphon.wire.ids import InstanceId

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from antiphon.model_worker.cache.groups import CacheGroup


GROUPS = (page_group(64),)


def recorded(*, overlap: bool = False, cursed: int | None = None) -> tuple[Stage, list[StepRecord]]:
    """A few requests in a world of their own, and the plans that it took."""
    with staged(overlap=overlap, curse=-1 if cursed is None else CURSE) as stage:
        for salt in range(4):
            prompt = harmless(9 + 8 * salt, salt)
            stage.run([*prompt, CURSE] if salt == cursed else prompt, tokens_max=12, seed=salt)
        stage.drain()
        return stage, list(stage.loop.recorder.records())


def last_records(
    records: Sequence[StepRecord], groups: Sequence[CacheGroup], count: int
) -> list[StepRecord]:
    """What a recorder keeps that has room for so many plans."""
    recorder = FlightRecorder(groups, plans_max=count)
    for record in records:
        recorder.begin(record.plan).outcome = record.outcome
    return list(recorder.records())


def run_again(
    records: Sequence[StepRecord], stage: Stage, vocab_size: int = VOCAB_SIZE
) -> ReplayResult:
    runner = HashRunner(stage.pools.groups, vocab_size)
    runner.plans = records[0].plan.step - 1
    return replay(records, stage.pools.groups, runner)


def header(stage: Stage, unix_ms: int = 7) -> RecordingHeader:
    return RecordingHeader(
        reason="a test",
        unix_ms=unix_ms,
        instance="worker.0",
        weights_digest="w",
        weight_version="default",
        groups=stage.pools.groups,
        resolved=None,
    )


def test_every_plan_is_kept_with_its_outcome() -> None:
    stage, records = recorded()
    assert [r.plan.step for r in records] == list(range(1, stage.reports[-1].step + 1))
    assert all(r.outcome is not None and r.outcome.step == r.plan.step for r in records)
    drawn = sum(len(r.outcome.token_ids) for r in records if r.outcome)
    assert drawn >= sum(len(told.ids) for told in stage.reported.values())


def test_the_oldest_plans_make_room() -> None:
    plan = recorded()[1][0].plan
    few, small = FlightRecorder(GROUPS, plans_max=3), FlightRecorder(GROUPS, bytes_max=6_000)
    for step in range(10):
        for recorder in (few, small):
            recorder.begin(msgspec.structs.replace(plan, step=step))
    assert [r.plan.step for r in few.records()] == [7, 8, 9]
    assert 1 < len(small.records()) < 6
    assert small.records()[-1].plan.step == 9


def test_a_plan_larger_than_all_that_may_be_kept_is_not_kept() -> None:
    recorder = FlightRecorder(GROUPS, bytes_max=10)
    recorder.begin(recorded()[1][0].plan)
    assert recorder.records() == ()


def test_what_a_client_sizes_counts() -> None:
    plan = recorded()[1][0].plan
    count = 50_000
    biases = Biases(
        logits=np.zeros(count, np.int32),
        token_ids=np.arange(count, dtype=np.int32),
        values=np.zeros(count, np.float32),
    )
    recorder = FlightRecorder(GROUPS, bytes_max=10 * count)
    recorder.begin(msgspec.structs.replace(plan, part=SamplingPart(biases=biases)))
    assert recorder.records() == ()


def test_a_summary_has_the_sizes_of_a_plan() -> None:
    plan = recorded()[1][0].plan
    expected = {"step": 1, "rows": 1, "tokens": 9, "kv_tokens_max": 9}
    assert summary(plan) | expected == summary(plan)


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    stage, records = recorded(cursed=1)
    lowered = penalties(3, {0: [1], 2: [3, 4]}, frequency=1.0, presence=1.0, repetition=1.0)
    masks = np.arange(3, dtype=np.int32)
    part = SamplingPart(penalties=lowered, token_masks=masks)
    plan = msgspec.structs.replace(records[0].plan, part=part)
    records[0] = StepRecord(plan)
    file = write(tmp_path / "new", header(stage), records)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    found = read(file)
    assert found.header == header(stage)
    assert len(found.records) == len(records)
    for one, other in zip(found.records, records, strict=True):
        assert one.failure == other.failure
        np.testing.assert_equal(fields(one.plan), fields(other.plan))
        np.testing.assert_equal(fields(one.outcome), fields(other.outcome))


def fields(value: object) -> object:
    """A plan or an outcome as plain containers."""
    names = getattr(type(value), "__dataclass_fields__", None)
    names = names or getattr(type(value), "__struct_fields__", None)
    return value if names is None else {name: fields(getattr(value, name)) for name in names}


def test_the_last_files_of_an_instance_are_kept(tmp_path: Path) -> None:
    stage, records = recorded()
    for number in range(FILES_MAX + 3):
        write(tmp_path, header(stage, unix_ms=100 + number), records[:1])
    kept = sorted(read(file).header.unix_ms for file in tmp_path.iterdir())
    assert kept == list(range(103, 103 + FILES_MAX))


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-5],
        lambda content: b"something else" + content,
        lambda content: content[:40] + b"\xff" * 40 + content[80:],
    ],
    ids=["cut", "other", "noise"],
)
def test_a_file_that_is_no_recording_is_refused(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    stage, records = recorded()
    file = write(tmp_path, header(stage), records)
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(RecordingBroken):
        read(file)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_replay_ends_as_it_did(overlap: bool) -> None:
    stage, records = recorded(overlap=overlap)
    result = run_again(records, stage)
    rows = sum(len(record.plan.slot) for record in records)
    assert result.difference is None
    assert (result.plans, result.passed, result.rows) == (len(records), 0, rows)


def test_a_replay_that_draws_otherwise_names_the_first_row_that_does() -> None:
    stage, records = recorded()
    result = run_again(records, stage, vocab_size=VOCAB_SIZE - 1)
    difference = result.difference
    assert difference is not None
    assert difference.row is not None
    outcome = records[difference.step - 1].outcome
    assert outcome is not None
    drawn = outcome.token_ids[outcome.starts[difference.row] :][:1].tolist()
    assert difference.recorded == f"tokens {drawn} status 0"
    assert str(difference).startswith(f"step {difference.step}, row {difference.row}: recorded")


def test_rows_that_build_on_what_was_not_recorded_are_passed_over() -> None:
    stage, records = recorded()
    records = last_records(records, stage.pools.groups, len(records) - 3)
    assert records[0].plan.step == 4
    assert (records[0].plan.kv_len > records[0].plan.query_len).any()
    result = run_again(records, stage)
    assert result.difference is None
    assert result.passed > 0
    assert result.rows > 0


@pytest.mark.parametrize("overlap", [False, True])
def test_a_plan_that_failed_is_expected_to_fail_again(overlap: bool) -> None:
    stage, records = recorded(cursed=2, overlap=overlap)
    assert any(record.failure.startswith("Cursed: ") for record in records)
    result = run_again(records, stage)
    assert result.difference is not None
    assert result.difference.replayed == "an outcome"
    assert "the failure Cursed" in result.difference.recorded

    class Again(HashRunner):
        def run(
            self, plan: StepPlan, part: Callable[[], SamplingPart] | None = None
        ) -> StepOutcome:
            outcome = super().run(plan, part)
            assert CURSE not in plan.tokens
            return outcome

    runner = Again(stage.pools.groups, VOCAB_SIZE)
    result = replay(records, stage.pools.groups, runner)
    assert result.difference is None
    assert result.failed > 0


def test_a_plan_without_an_end_is_run_and_not_compared() -> None:
    stage, records = recorded()
    records[-1].outcome = None
    result = run_again(records, stage)
    assert result.difference is None
    assert result.unended == 1


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a worker wrote that has just warmed up."""
    engine = open_engine(SMALL)
    loop = BatchingLoop(engine.core, InTurn(engine.runner), Mailbox(1), lambda _: None)
    warm_up(loop, engine)
    folder = tmp_path_factory.mktemp("dumps")
    dumps = PlanDumps(str(folder), InstanceId("worker-0"), engine, loop.recorder, SystemClock())
    return dumps.write("the test asked for it")


def test_the_same_model_ends_every_plan_as_it_did(
    dump: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(dump)]) == SAME
    shown = capsys.readouterr().out
    assert "worker-0: the test asked for it" in shown
    assert "2 of 2 plans run, 2 rows equal" in shown
    assert "no difference" in shown


def test_a_difference_is_shown_and_is_status_1(
    dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = read(dump)
    outcome = recording.records[1].outcome
    assert outcome is not None
    outcome.token_ids[0] += 1
    header = msgspec.structs.replace(recording.header, unix_ms=1)
    assert main([str(write(tmp_path, header, recording.records))]) == DIFFERENT
    assert "difference at step 2, row 0: recorded tokens" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", ["file", "folder", "model", "groups", "no model"])
def test_what_cannot_be_replayed_is_one_line_and_status_2(
    dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: str
) -> None:
    match wrong:
        case "file":
            line = [str(tmp_path / "none.plans")]
        case "folder":
            line = [str(dump), "--model-path", str(tmp_path)]
        case "model":
            line = [str(dump), "--model-path", str(write_llama(tmp_path / "other"))]
        case "groups":
            recording = read(dump)
            resolved = recording.header.resolved
            assert resolved is not None
            two = msgspec.structs.replace(resolved.attention_groups, value=2)
            resolved = msgspec.structs.replace(resolved, attention_groups=two)
            header = msgspec.structs.replace(recording.header, resolved=resolved)
            line = [str(write(tmp_path, header, recording.records))]
        case _:
            recording = read(dump)
            header = msgspec.structs.replace(recording.header, resolved=None)
            line = [str(write(tmp_path, header, recording.records))]
    assert main(line) == CANNOT_RUN
    said = capsys.readouterr().err
    assert said.startswith("antiphon replay: ")
    assert said.count("\n") == 1


def test_the_command_asks_a_process_that_may_load_models(tmp_path: Path) -> None:
    assert replay_command([str(tmp_path / "none.plans")]) == CANNOT_RUN
