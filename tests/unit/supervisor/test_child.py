"""What dies is started again, whatever the machine says to that, and its log stays small."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

from antiphon.config.load import child_environment
from antiphon.config.settings import Settings
from antiphon.supervisor import child as module
from antiphon.supervisor.child import Child
from antiphon.supervisor.restarts import Restarts
from antiphon.testing.wait import until
from antiphon.wire.base import Role
from antiphon.wire.ids import InstanceId

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


class Program(Child):
    """A child that runs a line of Python in place of a service."""

    line = ""

    @property
    def command(self) -> tuple[str, ...]:
        return (sys.executable, "-S", "-c", self.line)


def program(folder: Path, line: str) -> Program:
    found = Program(
        role=Role.TOKENIZER,
        instance=InstanceId("tokenizer-0"),
        settings=Settings(),
        config=folder / "settings.yaml",
        log_folder=folder / "logs",
        environment=child_environment(Settings()),
    )
    found.line = line
    return found


def test_the_first_restart_is_at_once_and_later_ones_wait_ever_longer():
    restarts = Restarts()
    pauses = [restarts.pause_s(now) for now in (0.0, 1.0, 2.0, 3.0, 100.0)]
    assert pauses == [0.0, 0.5, 1.0, 2.0, 0.0]


async def test_a_service_that_cannot_start_is_tried_again(tmp_path: Path):
    service = program(tmp_path, "raise SystemExit('no model')")
    await service.start()
    async with asyncio.TaskGroup() as group:
        keep = group.create_task(service.keep())
        await until(lambda: service.log_tail().count("no model") == 3)
        keep.cancel()
    await service.stop(1.0)
    assert not service.alive


async def test_a_start_that_the_machine_refuses_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    service = program(tmp_path, "import time; time.sleep(60)")
    await service.start()
    service.log_path.rename(tmp_path / "old.log")
    service.log_path.mkdir()  # a log that cannot be opened
    async with asyncio.TaskGroup() as group:
        keep = group.create_task(service.keep())
        service.kill()
        await until(lambda: "service did not start" in caplog.text)
        service.log_path.rmdir()
        await until(lambda: service.alive)
        keep.cancel()
    await service.stop(1.0)


async def test_a_long_log_begins_anew_under_the_running_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "LOG_BYTES_MAX", 8)
    go = tmp_path / "go"
    waits = f"while not os.path.exists({str(go)!r}): time.sleep(0.01)"
    lines = ("import os, time", "print('much text', flush=True)", waits, "print('more')")
    service = program(tmp_path, "\n".join(lines))
    await service.start()
    await until(lambda: service.log_tail() == "much text")
    service.trim_log()
    go.touch()
    await service.died()
    assert service.log_tail() == "more"
    service.trim_log()
    assert service.log_tail() == "more"
    assert [path.read_text() for path in tmp_path.glob("logs/*.1.log")] == ["much text\n"]
