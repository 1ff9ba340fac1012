"""The stages of `make test-gpu`, as far as they need no GPU: see also `interpreted/stages.py`."""

from __future__ import annotations

import os
import select
import sys
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from tests.gpu import __main__ as command
from tests.gpu import bench, checks
from tests.gpu.stages import TIMEOUT_S, GpuStage, run_stage, run_stages
from tests.gpu.timing import idle_share

if TYPE_CHECKING:
    from collections.abc import Callable

SLEEPS = "import time; time.sleep(60)"


def stage(code: str, name: str = "a", **fields: Any) -> GpuStage:
    return GpuStage(name=name, promise="p", command=(sys.executable, "-c", code), **fields)


def test_stage_that_passes_has_the_facts_of_its_last_line() -> None:
    result = run_stage(stage("print('{\"x\": 0}'); print('{\"gb_s\": 2.5}')"))
    assert (result.outcome, result.facts, result.output) == ("passed", {"gb_s": 2.5}, "")
    assert run_stage(stage("print('[1]')")).facts == {}
    assert run_stage(stage("")).facts == {}


def test_stage_that_fails_has_the_last_of_its_output() -> None:
    code = "import sys; sys.stdout.buffer.write(b'\\xff' * 20_000); sys.exit('lost')"
    result = run_stage(stage(code))
    assert (result.outcome, result.facts) == ("failed", {})
    assert result.output.endswith("lost\n")
    assert len(result.output) <= 8192
    assert run_stage(stage("import os; os.abort()")).outcome == "failed"


def test_stage_that_hangs_ends_with_all_that_it_has_started() -> None:
    code = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {SLEEPS!r}])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    result = run_stage(stage(code, timeout_s=3.0))
    assert result.outcome == "timed out"
    assert result.seconds < 30
    assert has_ended(int(result.output))


def has_ended(pid: int) -> bool:
    """Whether a process ends soon; one that was killed may yet have to be scheduled for it."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ended, _, _ = select.select([handle], [], [], 10)
    os.close(handle)
    return bool(ended)


def test_stages_after_one_that_fails_are_run(capsys: pytest.CaptureFixture[str]) -> None:
    stages = [
        stage("raise SystemExit(3)", "first"),
        stage("", "absent", needs="a-program-that-is-nowhere"),
        stage("print('{\"n\": 1}')", "last"),
    ]
    assert run_stages(stages) == 1
    lines = [msgspec.json.decode(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["stage"], line["outcome"]) for line in lines] == [
        ("first", "failed"),
        ("absent", "skipped"),
        ("last", "passed"),
    ]
    assert lines[1]["output"] == "a-program-that-is-nowhere is not installed"
    assert run_stages(stages[1:]) == 0


@pytest.mark.parametrize("installed", ["2.10.1", "2.14.0+cu130", "3.0.0", "1.13.1"])
def test_a_torch_that_is_not_supported_is_named_in_one_line(installed: str) -> None:
    with pytest.raises(SystemExit) as ended:
        checks.check_torch(installed)
    assert ended.value.code == f"torch {installed} is installed; torch 2.11 to 2.13 is wanted"


def test_a_torch_of_another_version_fails_its_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    with pytest.raises(SystemExit, match=r"2\.11 to 2\.13 is wanted"):
        checks.versions()
    for installed in ("2.11.0", "2.12.1+cu130", "2.13.0a0+git1234"):
        checks.check_torch(installed)


def test_every_stage_fits_ten_minutes_and_has_a_function() -> None:
    stages = [*command.CHECKS, *command.BENCHES]
    assert all(stage.timeout_s <= TIMEOUT_S for stage in stages)
    names = [stage.name for stage in stages]
    assert len(set(names)) == len(names)
    for module in (checks, bench):
        of_module = [each.command[-1] for each in stages if module.__name__ in each.command]
        assert of_module == [*module.STAGES]


@pytest.fixture
def run_command(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., tuple[int, list[str]]]:
    """Runs the command; returns its status and the stages that it would run."""

    def run(*arguments: str) -> tuple[int, list[str]]:
        ran: list[str] = []

        def note(stages: Any) -> int:
            ran.extend(stage.name for stage in stages)
            return 0

        monkeypatch.setattr(command, "run_stages", note)
        monkeypatch.setattr(sys, "argv", ["tests.gpu", *arguments])
        return command.main(), ran

    return run


def test_stages_can_be_chosen(
    run_command: Callable[..., tuple[int, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "find_gpu", lambda name: 1)
    every = [stage.name for stage in (*command.CHECKS, *command.BENCHES)]
    assert run_command() == (0, every)
    assert run_command("--bench") == (0, every[len(command.CHECKS) :])
    assert run_command("--stages", "parity", "versions") == (0, ["versions", "parity"])
    assert run_command("--bench", "--stages", "parity") == (0, ["parity"])
    with pytest.raises(SystemExit):
        run_command("--stages", "nothing")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_machine_without_a_gpu_is_named_in_one_line(
    run_command: Callable[..., tuple[int, list[str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command() == (1, [])
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("model.device = cuda: no such device: torch")


def test_idle_is_what_no_kernel_covers() -> None:
    kernels = [(0.0, 2.0), (1.0, 3.0), (1.5, 2.5), (6.0, 7.0), (9.0, 12.0)]
    assert idle_share(kernels, 1.0, 11.0) == pytest.approx(0.5)
    assert idle_share([], 0.0, 1.0) == 1.0
    assert idle_share([(0.0, 9.0)], 1.0, 2.0) == 0.0
