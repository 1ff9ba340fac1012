"""The death of a worker that the supervisor has seen, or its drain, needs no silence."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
from typing import TYPE_CHECKING

import pytest
from openai import OpenAI
from tests.system.stack import Stack, heartbeats, module_stack, run_antiphon, wait_until

from antiphon.cli.main import main
from antiphon.wire.base import ProcessState

if TYPE_CHECKING:
    from collections.abc import Callable

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


def test_streams_of_a_killed_worker_go_on_before_its_silence_would_be_noticed(
    stack: Stack,
) -> None:
    wait_until(stack.healthy, 30, "healthy before the kill")
    undisturbed = read(stack)
    disturbed = read(stack, kill)
    assert [reader.text for reader in disturbed] == [reader.text for reader in undisturbed]
    pauses = [round(reader.pause_s, 2) for reader in disturbed]
    print("longest pauses", pauses, "undisturbed", [round(r.pause_s, 2) for r in undisturbed])
    assert max(pauses) < PAUSE_S_MAX
    assert "request migrates" in stack.log("scheduler-0")


def test_streams_of_a_drained_worker_go_on_at_another(stack: Stack) -> None:
    """The worker stays, and runs nothing."""
    asyncio.run(heartbeats(stack.nats_url, both_ready, timeout_s=60))
    undisturbed = read(stack)
    before = stack.log("scheduler-0").count("request migrates")
    drained = read(stack, drain)
    assert [reader.text for reader in drained] == [reader.text for reader in undisturbed]
    assert stack.log("scheduler-0").count("request migrates") > before
    print("longest pauses", [round(reader.pause_s, 2) for reader in drained])


def test_drain_of_an_unknown_worker_says_so(stack: Stack) -> None:
    result = run_antiphon("drain", "worker-9", "--bus-url", stack.nats_url, timeout_s=60)
    assert result.returncode == 1
    assert "antiphon drain: worker-9: " in result.stderr
    assert "Traceback" not in result.stderr
