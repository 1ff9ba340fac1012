"""A worker's death that its supervisor or the broker has seen, or its drain, needs no silence."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from openai import OpenAI
from tests.support.nats_link import linked
from tests.system.stack import (
    START_TIMEOUT_S,
    STOP_TIMEOUT_S,
    Stack,
    heartbeats,
    module_stack,
    run_antiphon,
    wait_until,
)

from antiphon.cli.main import main
from antiphon.wire.base import ProcessState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from antiphon.wire.heartbeat import Heartbeat

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

HEARTBEAT_S = 3.0
"""So that silence takes 15 s, far longer than another worker needs to go on."""
PAUSE_S_MAX = 8.0
STREAMS = 4

stack = module_stack(
    "--enable-deterministic-inference", "--dp-size", "2", "--service-heartbeat-s", str(HEARTBEAT_S)
)


class Reader(threading.Thread):
    """Streams a completion; `pause_s` is the longest time between two of its parts."""

    def __init__(self, stack: Stack, number: int) -> None:
        super().__init__()
        self.text = ""
        self.pause_s = 0.0
        self.error: Exception | None = None
        self._stack = stack
        self._number = number

    def run(self) -> None:
        try:
            with OpenAI(base_url=f"{self._stack.url}/v1", api_key="none", max_retries=0) as client:
                stream = client.completions.create(
                    model=self._stack.model,
                    prompt=f"Count from {self._number} to 900:",
                    max_tokens=1200,
                    temperature=0,
                    stream=True,
                    timeout=60,
                    extra_body={"ignore_eos": True},
                )
                last = time.monotonic()
                for chunk in stream:
                    now = time.monotonic()
                    if self.text:
                        self.pause_s = max(self.pause_s, now - last)
                    last = now
                    self.text += chunk.choices[0].text
        except Exception as error:  # noqa: BLE001  # whatever it is, the test names it
            self.error = error


def both_ready(beats: dict[str, Heartbeat]) -> bool:
    ready = {name for name, beat in beats.items() if beat.state is ProcessState.READY}
    return {"worker-0", "worker-1"} <= ready


def all_three_ready(beats: dict[str, Heartbeat]) -> bool:
    third = beats.get("worker-2")
    return both_ready(beats) and third is not None and third.state is ProcessState.READY


def kill(stack: Stack) -> None:
    pid = stack.pid("worker-0")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def drain(stack: Stack) -> None:
    """Drain the worker that has got the last request; in this process, which has read its code."""
    worker = re.findall(r"request bound .*?worker=(worker-\d)", stack.log("scheduler-0"))[-1]
    assert main(["drain", worker, "--bus-url", stack.nats_url]) == 0


def read(stack: Stack, disturb: Callable[[Stack], None] | None = None) -> list[Reader]:
    """Clients that have read their answers, perhaps while a worker was taken from them."""
    readers = [Reader(stack, number) for number in range(STREAMS)]
    for reader in readers:
        reader.start()
    if disturb is not None:
        wait_until(lambda: all(reader.text for reader in readers), 30, "the first words")
        unread = [reader.is_alive() for reader in readers]
        disturb(stack)
        assert all(unread), "they had ended before that"
    for reader in readers:
        reader.join(60)
        assert not reader.is_alive(), "a request hangs"
    assert [reader.error for reader in readers] == [None] * len(readers)
    return readers


@pytest.fixture(scope="module")
def texts(stack: Stack) -> list[str]:
    """What the answers are without a fault."""
    wait_until(stack.healthy, 30, "healthy before the first fault")
    undisturbed = read(stack)
    print("undisturbed", [round(reader.pause_s, 2) for reader in undisturbed])
    return [reader.text for reader in undisturbed]


def test_streams_of_a_killed_worker_go_on_before_its_silence_would_be_noticed(
    stack: Stack, texts: list[str]
) -> None:
    disturbed = read(stack, kill)
    assert [reader.text for reader in disturbed] == texts
    pauses = [round(reader.pause_s, 2) for reader in disturbed]
    print("longest pauses", pauses)
    assert max(pauses) < PAUSE_S_MAX
    assert "request migrates" in stack.log("scheduler-0")


@contextmanager
def lone_worker(stack: Stack, url: str) -> Iterator[subprocess.Popen[bytes]]:
    """A third worker that no supervisor watches; its broker is at this URL."""
    command = [sys.executable, "-m", "antiphon.model_worker", "--instance", "worker-2"]
    command += ["--config", str(stack.logs.parent / "settings.yaml"), "--bus-url", url]
    with (stack.logs / "worker-2.log").open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        yield process
    finally:
        process.kill()
        process.wait(STOP_TIMEOUT_S)


async def test_of_a_worker_without_a_supervisor_the_broker_knows_whether_it_has_ended(
    stack: Stack, texts: list[str]
) -> None:
    """Its connection ends for a moment, which changes nothing; then it is killed."""
    loop = asyncio.get_running_loop()

    def log() -> str:
        return stack.log("scheduler-0")

    async with linked(stack.nats_url) as link:
        with lone_worker(stack, link.url) as worker:

            def cut(stack: Stack) -> None:
                assert "worker=worker-2" in log()[began:], "it has no request"
                loop.call_soon_threadsafe(link.cut, "worker-2")

            def kill_alone(stack: Stack) -> None:
                assert "worker=worker-2" in log()[began:], "it has no request"
                worker.kill()

            await heartbeats(stack.nats_url, all_three_ready, timeout_s=START_TIMEOUT_S)
            began = len(log())
            disturbed = await asyncio.to_thread(read, stack, cut)
            assert [reader.text for reader in disturbed] == texts
            assert "peer died" not in log()[began:]
            assert "request migrates" not in log()[began:]
            began = len(log())
            disturbed = await asyncio.to_thread(read, stack, kill_alone)
    assert [reader.text for reader in disturbed] == texts
    pauses = [round(reader.pause_s, 2) for reader in disturbed]
    print("longest pauses", pauses)
    assert max(pauses) < PAUSE_S_MAX
    assert "request migrates" in log()[began:]


def test_streams_of_a_drained_worker_go_on_at_another(stack: Stack, texts: list[str]) -> None:
    """The worker stays, and runs nothing."""
    asyncio.run(heartbeats(stack.nats_url, both_ready, timeout_s=60))
    before = stack.log("scheduler-0").count("request migrates")
    drained = read(stack, drain)
    assert [reader.text for reader in drained] == texts
    assert stack.log("scheduler-0").count("request migrates") > before
    print("longest pauses", [round(reader.pause_s, 2) for reader in drained])


def test_drain_of_an_unknown_worker_says_so(stack: Stack) -> None:
    result = run_antiphon("drain", "worker-9", "--bus-url", stack.nats_url, timeout_s=60)
    assert result.returncode == 1
    assert "antiphon drain: worker-9: " in result.stderr
    assert "Traceback" not in result.stderr
