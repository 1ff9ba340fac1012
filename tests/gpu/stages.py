"""Stages of a command: each is a process of its own with a limit of its time, and ends in JSON.

A stage that fails, or hangs, does not stop those after it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

TIMEOUT_S = 600.0
OUTPUT_BYTES = 8192
"""Of what a stage has printed, the last are kept."""


class GpuStage(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the command.

    Attributes:
        needs: A program without which it is skipped.
    """

    name: str
    promise: str
    command: tuple[str, ...]
    timeout_s: float = TIMEOUT_S
    needs: str = ""


class StageResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What came of a stage.

    Attributes:
        facts: The last line that it printed, if that is a JSON object.
        output: The last of what it printed, if it has not passed.
    """

    stage: str
    outcome: Literal["passed", "failed", "timed out", "skipped"]
    seconds: float = 0.0
    facts: dict[str, Any] = {}
    output: str = ""


def run_stages(stages: Iterable[GpuStage]) -> int:
    """Run them in turn, print the result of each as a line, and return the exit status."""
    status = 0
    for stage in stages:
        print(f"{stage.name}: {stage.promise}", file=sys.stderr, flush=True)
        result = run_stage(stage)
        print(msgspec.json.encode(result).decode(), flush=True)
        if result.outcome not in ("passed", "skipped"):
            status = 1
    return status


def run_stage(stage: GpuStage) -> StageResult:
    """Run one; at the limit of its time it ends with all processes that it has started."""
    if stage.needs and shutil.which(stage.needs) is None:
        output = f"{stage.needs} is not installed"
        return StageResult(stage=stage.name, outcome="skipped", output=output)
    began = time.monotonic()
    # A file, since a process that is left over would keep a pipe open.
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            stage.command,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(stage.timeout_s)
        finally:
            if status is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        seconds = round(time.monotonic() - began, 1)
        printed.seek(max(0, printed.seek(0, os.SEEK_END) - OUTPUT_BYTES))
        output = printed.read().decode(errors="replace")
    outcome = "timed out" if status is None else "failed" if status else "passed"
    return StageResult(
        stage=stage.name,
        outcome=outcome,
        seconds=seconds,
        facts=_facts(output),
        output="" if outcome == "passed" else output,
    )


def _facts(output: str) -> dict[str, Any]:
    last = output.rstrip().rpartition("\n")[2]
    try:
        return msgspec.json.decode(last, type=dict[str, Any])
    except msgspec.DecodeError:
        return {}
