"""`antiphon replay`, on plans that the embedded model has run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from tests.models.tiny import write_llama
from tests.unit.model_worker.test_opening import SMALL

from antiphon.cli.commands import replay as replay_command
from antiphon.model_worker.batching.loop import BatchingLoop
from antiphon.model_worker.batching.mailbox import Mailbox
from antiphon.model_worker.observability.recording import PlanDumps, read, write
from antiphon.model_worker.observability.replay import CANNOT_RUN, DIFFERENT, SAME, main
from antiphon.model_worker.startup.engine import open_engine, warm_up
from antiphon.service.clock import SystemClock
from antiphon.wire.ids import InstanceId

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a worker wrote that has just warmed up."""
    engine = open_engine(SMALL)
    loop = BatchingLoop(engine.core, engine.runner, Mailbox(1), lambda _: None)
    warm_up(loop)
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


@pytest.mark.parametrize("wrong", ["file", "folder", "model", "no model"])
def test_what_cannot_be_run_is_told_in_a_line_and_is_status_2(
    dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: str
) -> None:
    match wrong:
        case "file":
            line = [str(tmp_path / "none.plans")]
        case "folder":
            line = [str(dump), "--model-path", str(tmp_path)]
        case "model":
            line = [str(dump), "--model-path", str(write_llama(tmp_path / "other"))]
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
