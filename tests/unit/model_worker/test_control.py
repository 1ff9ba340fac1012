"""Control commands of operators over the bus, and what a worker leaves when it must end."""

from __future__ import annotations

import logging
from dataclasses import replace
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
    opener_of,
    staged,
)

from antiphon.model_worker.batching.engine_core import EngineCore
from antiphon.model_worker.batching.state import Progress
from antiphon.model_worker.observability.recording import read
from antiphon.model_worker.observability.watchdog import LoopHung
from antiphon.model_worker.startup.engine import Engine
from antiphon.wire.base import FinishReason
from antiphon.wire.command import (
    ContinueWorker,
    ControlDone,
    DumpPlans,
    FlushCache,
    KernelChoice,
    ListKernels,
    PauseMode,
    PauseWorker,
    SetWeightVersion,
)
from antiphon.wire.errors import Internal, InvalidRequest, Unsupported

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from antiphon.config.settings import Settings
    from antiphon.model_worker.batching.state import AnyProgress


def dumping_to(folder: Path) -> Settings:
    batching = msgspec.structs.replace(QUICK.batching, dump_folder=str(folder))
    return msgspec.structs.replace(QUICK, batching=batching)


async def test_paused_worker_reports_it_and_lets_requests_wait() -> None:
    async with staged() as stage:
        assert await stage.control(PauseWorker()) == ControlDone()
        await until(lambda: stage.load.paused)
        await stage.command(admit("a"))
        await stage.load_is(1)
        await until(lambda: stage.load.waiting == 1)
        assert stage.load.step_age_s == 0.0
        await until(lambda: stage.metric("paused_workers") == 1.0)
        assert not stage.ids("a")
        await stage.control(ContinueWorker())
        await until(lambda: stage.ended("a"))
        await until(lambda: not stage.load.paused)


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE])
async def test_paused_request_sends_all_of_its_output(mode: PauseMode) -> None:
    async with staged() as stage:
        await stage.start(admit("a", 900))
        done = await stage.control(PauseWorker(mode=mode))
        assert done.requests == 1
        await stage.control(ContinueWorker())
        await until(lambda: stage.ended("a"))
        assert len(stage.ids("a")) == 900


async def test_aborting_pause_ends_requests_with_their_outputs_so_far() -> None:
    async with staged() as stage:
        await stage.start(admit("a", 900))
        await stage.control(PauseWorker(mode=PauseMode.ABORT))
        await until(lambda: stage.ended("a"))
        assert stage.rows[-1].finish_reason is FinishReason.ABORT
        assert 0 < len(stage.ids("a")) < 900


async def test_commands_are_answered_each_with_its_own_result() -> None:
    async with staged() as stage:
        await stage.start(admit("a", 900))
        assert (await stage.control(FlushCache())).requests == 0
        assert (await stage.control(PauseWorker(mode=PauseMode.IN_PLACE))).requests == 1
        assert (await stage.control(SetWeightVersion(version="next"))).requests == 1
        # The heartbeat is sent before the reply.
        assert stage.load.weight_version == "next"
        assert (await stage.control(PauseWorker())).requests == 0


async def test_flush_unless_busy_is_skipped_while_a_request_runs() -> None:
    gently = FlushCache(unless_busy=True)
    async with staged() as stage:
        await stage.control(PauseWorker())
        await stage.command(admit("a"), admit("b", 900))
        await stage.load_is(2)
        assert (await stage.control(gently)).requests == 2
        await stage.control(ContinueWorker())
        await until(lambda: stage.ended("a") and stage.ended("b"))
        assert (await stage.control(gently)).requests == 0


async def test_weight_version_without_a_name_is_rejected() -> None:
    async with staged() as stage:
        with pytest.raises(InvalidRequest, match="version"):
            await stage.control(SetWeightVersion(version=""))


async def test_plans_are_written_by_a_command(tmp_path: Path) -> None:
    async with staged(settings=dumping_to(tmp_path)) as stage:
        await stage.finish(admit("a"))
        done = await stage.control(DumpPlans())
        recording = read(tmp_path / done.file)
        assert recording.header.instance == stage.worker.process.instance
        assert recording.header.reason == "requested by a command"
        assert len(recording.records) >= 5


async def test_plans_are_not_written_without_a_folder() -> None:
    async with staged() as stage:
        with pytest.raises(Unsupported, match="dump_folder is empty"):
            await stage.control(DumpPlans())


async def test_dump_to_an_unwritable_folder_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("not a folder")
    async with staged(settings=dumping_to(file)) as stage:
        with pytest.raises(Internal, match="cannot be written"):
            await stage.control(DumpPlans())


async def stall(stage: Stage, held: HeldRunner, clock: ShiftedClock, shift_s: float) -> None:
    """Admit a request whose first step does not begin, for so long."""
    held.go.clear()
    await stage.command(admit("a"))
    await until(lambda: stage.metric("held_reqs") == 1.0)  # seen by the worker's watchdog
    clock.shift_s = shift_s


async def test_stalled_step_is_logged_once_with_its_stack_and_plan(
    caplog: pytest.LogCaptureFixture,
) -> None:
    held, clock = HeldRunner(), ShiftedClock()
    with caplog.at_level(logging.ERROR):
        async with staged(opener_of(held.around), clock=clock) as stage:
            await stall(stage, held, clock, 60.0)
            await until(lambda: stage.metric("stalls_total") == 1.0)
            held.go.set()
            await until(lambda: stage.ended("a"))
            assert stage.metric("stalls_total") == 1.0
    (line,) = [vars(r) for r in caplog.records if r.message == "batching loop stalled"]
    assert "self.go.wait" in line["stack"]
    assert (line["rows"], line["tokens"]) == (1, 3)


async def test_hung_step_ends_the_process_and_leaves_its_plans(tmp_path: Path) -> None:
    held, clock, settings = HeldRunner(), ShiftedClock(), dumping_to(tmp_path)
    with pytest.RaisesGroup(LoopHung, flatten_subgroups=True):
        async with staged(opener_of(held.around), settings, clock) as stage:
            await stall(stage, held, clock, 400.0)
            await until(lambda: any(tmp_path.glob("*.plans")))
            held.go.set()  # so that the test's own process can leave
            await stage.worker.gone.wait()
    (file,) = tmp_path.glob("*.plans")
    recording = read(file)
    assert recording.header.reason.startswith("LoopHung: ")
    assert recording.records[-1].outcome is None


class BrokenProgress(EngineCore):
    """Reports progress that cannot be added, once the warm-up is over."""

    def take_progress(self) -> Sequence[AnyProgress]:
        progress = super().take_progress()
        if self.limits.weight_version != "broken":
            return progress
        return [
            msgspec.structs.replace(news, start=-1) if isinstance(news, Progress) else news
            for news in progress
        ]


async def test_worker_reports_its_kernels() -> None:
    kernels = (KernelChoice(op="norm.rmsnorm", backend="torch", refused={"cpu": "no compiler"}),)

    def open_with(settings: Settings) -> Engine:
        return replace(open_hash_engine(settings), kernels=kernels)

    async with staged(open_with) as stage:
        await stage.control(PauseWorker())
        assert await stage.control(ListKernels()) == ControlDone(kernels=kernels)
        assert ListKernels.__name__ in stage.beats[-1].reads


async def test_progress_that_cannot_be_added_ends_its_request_alone(tmp_path: Path) -> None:
    def open_broken(settings: Settings) -> Engine:
        engine = open_hash_engine(settings)
        return Engine(BrokenProgress(engine.core.limits, engine.core.pools), engine.runner)

    async with staged(open_broken, dumping_to(tmp_path)) as stage:
        await stage.control(SetWeightVersion(version="broken"))
        await stage.finish(admit("a"))
        (end,) = (row for row in stage.rows if row.finish_reason is not None)
        assert end.error is not None
        assert end.error.code == "internal"
        await stage.control(SetWeightVersion(version="mended"))
        await stage.finish(admit("b"))
        assert len(stage.ids("b")) == 5
        assert not stage.worker.gone.is_set()
        await stage.close("a", "b")
