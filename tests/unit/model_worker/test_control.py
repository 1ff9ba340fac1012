"""What operators tell a worker over the bus, and what it leaves behind when it must end."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec
import pytest
from tests.support.wait import until
from tests.unit.model_worker.test_service import (
    QUICK,
    HeldRunner,
    ShiftedClock,
    Stage,
    admit,
    open_hash_engine,
    staged,
)

from antiphon.model_worker.batching.engine_core import EngineCore
from antiphon.model_worker.observability.recording import read
from antiphon.model_worker.observability.watchdog import LoopHung
from antiphon.model_worker.startup.engine import Engine
from antiphon.wire.base import FinishReason
from antiphon.wire.command import (
    ContinueWorker,
    ControlDone,
    DumpPlans,
    FlushCache,
    PauseMode,
    PauseWorker,
    SetWeightVersion,
)
from antiphon.wire.errors import Internal, InvalidRequest, Unsupported
from antiphon.wire.routes import WORKER_CONTROL

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from antiphon.config.settings import Settings
    from antiphon.model_worker.batching.state import Progress
    from antiphon.model_worker.control import ControlMessage


class ControlStage(Stage):
    """A worker, and somebody who may give it orders."""

    async def order(self, message: ControlMessage) -> ControlDone:
        worker = self.worker.process.instance
        return await self.bus.call(WORKER_CONTROL, message, timeout_s=5.0, worker=worker)

    async def watched(self) -> None:
        """Wait until the worker has looked at its loop with the request in it."""
        await until(lambda: self.metric("held_reqs") == 1.0)

    def metric(self, name: str) -> float | None:
        return self.worker.metrics.registry.get_sample_value(f"antiphon_{name}")


def controlled(
    settings: Settings = QUICK,
    opener: Callable[[Settings], Engine] = open_hash_engine,
    clock: ShiftedClock | None = None,
) -> AbstractAsyncContextManager[ControlStage]:
    return staged(opener, ControlStage, settings, clock)


def dumping_to(folder: Path) -> Settings:
    batching = msgspec.structs.replace(QUICK.batching, dump_folder=str(folder))
    return msgspec.structs.replace(QUICK, batching=batching)


async def test_paused_worker_reports_it_and_lets_requests_wait() -> None:
    async with controlled() as stage:
        assert await stage.order(PauseWorker()) == ControlDone()
        await until(lambda: stage.load is not None and stage.load.paused)
        await stage.command(admit("a"))
        await stage.load_is(1)
        await until(lambda: stage.load is not None and stage.load.waiting == 1)
        assert stage.load is not None
        assert stage.load.step_age_s == 0.0
        await until(lambda: stage.metric("paused_workers") == 1.0)
        assert not stage.ids("a")
        await stage.order(ContinueWorker())
        await until(lambda: stage.ended("a"))
        assert stage.load is not None
        await until(lambda: stage.load is not None and not stage.load.paused)


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE])
async def test_paused_request_sends_all_of_its_output(mode: PauseMode) -> None:
    async with controlled() as stage:
        await stage.command(admit("a", 900))
        await until(lambda: bool(stage.ids("a")))
        done = await stage.order(PauseWorker(mode=mode))
        assert done.requests == 1
        await stage.order(ContinueWorker())
        await until(lambda: stage.ended("a"))
        assert len(stage.ids("a")) == 900


async def test_aborting_pause_ends_requests_with_their_outputs_so_far() -> None:
    async with controlled() as stage:
        await stage.command(admit("a", 900))
        await until(lambda: bool(stage.ids("a")))
        await stage.order(PauseWorker(mode=PauseMode.ABORT))
        await until(lambda: stage.ended("a"))
        assert stage.rows[-1].finish_reason is FinishReason.ABORT
        assert 0 < len(stage.ids("a")) < 900


async def test_commands_are_answered_each_with_its_own_result() -> None:
    async with controlled() as stage:
        await stage.command(admit("a", 900))
        await until(lambda: bool(stage.ids("a")))
        assert (await stage.order(FlushCache())).requests == 0
        assert (await stage.order(PauseWorker(mode=PauseMode.IN_PLACE))).requests == 1
        assert (await stage.order(SetWeightVersion(version="next"))).requests == 1
        # Whoever has heard the reply has heard the heartbeat.
        assert stage.load is not None
        assert stage.load.weight_version == "next"
        assert (await stage.order(PauseWorker())).requests == 0


async def test_flush_unless_busy_is_skipped_while_a_request_runs() -> None:
    gently = FlushCache(unless_busy=True)
    async with controlled() as stage:
        await stage.order(PauseWorker())
        await stage.command(admit("a"), admit("b", 900))
        await stage.load_is(2)
        assert (await stage.order(gently)).requests == 2
        await stage.order(ContinueWorker())
        await until(lambda: stage.ended("a") and stage.ended("b"))
        # Whoever has read the end of an answer finds it ended.
        assert (await stage.order(gently)).requests == 0


async def test_weight_version_without_a_name_is_rejected() -> None:
    async with controlled() as stage:
        with pytest.raises(InvalidRequest, match="version"):
            await stage.order(SetWeightVersion(version=""))


async def test_plans_are_written_by_a_command(tmp_path: Path) -> None:
    async with controlled(dumping_to(tmp_path)) as stage:
        await stage.command(admit("a"))
        await until(lambda: stage.ended("a"))
        done = await stage.order(DumpPlans())
        recording = read(tmp_path / done.file)
        assert recording.header.instance == stage.worker.process.instance
        assert recording.header.reason == "requested by a command"
        assert len(recording.records) >= 5


async def test_plans_are_not_written_without_a_folder() -> None:
    async with controlled() as stage:
        with pytest.raises(Unsupported, match="dump_folder is empty"):
            await stage.order(DumpPlans())


async def test_dump_to_an_unwritable_folder_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("not a folder")
    async with controlled(dumping_to(file)) as stage:
        with pytest.raises(Internal, match="cannot be written"):
            await stage.order(DumpPlans())


class Stuck:
    """An engine whose steps begin when the test says so."""

    def __init__(self) -> None:
        self.runner = HeldRunner()
        self.clock = ShiftedClock()

    def open(self, settings: Settings) -> Engine:
        engine = open_hash_engine(settings)
        self.runner.runner = engine.runner
        return Engine(engine.core, self.runner)


async def test_stalled_step_is_logged_once_with_its_stack_and_plan(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stuck = Stuck()
    with caplog.at_level(logging.ERROR):
        async with controlled(opener=stuck.open, clock=stuck.clock) as stage:
            stuck.runner.go.clear()
            await stage.command(admit("a"))
            await stage.watched()
            stuck.clock.shift_s = 60.0
            await until(lambda: stage.metric("stalls_total") == 1.0)
            stuck.runner.go.set()
            await until(lambda: stage.ended("a"))
            assert stage.metric("stalls_total") == 1.0
    (said,) = [r for r in caplog.records if r.message == "batching loop stalled"]
    told = vars(said)
    assert "self.go.wait" in told["stack"]
    assert (told["rows"], told["tokens"]) == (1, 3)


async def test_hung_step_ends_the_process_and_leaves_its_plans(tmp_path: Path) -> None:
    stuck = Stuck()
    with pytest.RaisesGroup(LoopHung, flatten_subgroups=True):
        async with controlled(dumping_to(tmp_path), stuck.open, stuck.clock) as stage:
            stuck.runner.go.clear()
            await stage.command(admit("a"))
            await stage.watched()
            stuck.clock.shift_s = 400.0
            await until(lambda: any(tmp_path.glob("*.plans")))
            stuck.runner.go.set()  # so that the test's own process can leave
            await stage.worker.gone.wait()
    (file,) = tmp_path.glob("*.plans")
    recording = read(file)
    assert recording.header.reason.startswith("LoopHung: ")
    assert recording.records[-1].outcome is None


class Babbling(EngineCore):
    """Says something that nobody can take in, once the warm-up is over."""

    def take_progress(self) -> Sequence[Progress]:
        progress = super().take_progress()
        if self.limits.weight_version != "broken":
            return progress
        return tuple(msgspec.structs.replace(news, token_ids=None) for news in progress)


async def test_progress_that_cannot_be_added_ends_its_request_alone(tmp_path: Path) -> None:
    def open_babbling(settings: Settings) -> Engine:
        engine = open_hash_engine(settings)
        batching = engine.core
        return Engine(Babbling(batching.limits, batching.pools), engine.runner)

    async with controlled(dumping_to(tmp_path), open_babbling) as stage:
        await stage.order(SetWeightVersion(version="broken"))
        await stage.command(admit("a"))
        await until(lambda: stage.ended("a"))
        (end,) = (row for row in stage.rows if row.finish_reason is not None)
        assert end.error is not None
        assert end.error.code == "internal"
        await stage.order(SetWeightVersion(version="mended"))
        await stage.command(admit("b"))
        await until(lambda: stage.ended("b"))
        assert len(stage.ids("b")) == 5
        assert not stage.worker.gone.is_set()
        await stage.close("a", "b")
