"""The death of a process that the supervisor has seen needs no silence to be noticed."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from openai import OpenAI
from tests.system.stack import Stack, module_stack, wait_until

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


def read(stack: Stack, victim: str | None = None) -> list[Reader]:
    """Clients that have read their answers, perhaps while a process was killed."""
    readers = [Reader(stack, number) for number in range(STREAMS)]
    for reader in readers:
        reader.start()
    if victim is not None:
        wait_until(lambda: all(reader.text for reader in readers), 30, "the first words")
        pid = stack.pid(victim)
        assert pid is not None
        unread = [reader.is_alive() for reader in readers]
        os.kill(pid, signal.SIGKILL)
        assert all(unread), "they had ended before the kill"
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
    disturbed = read(stack, "worker-0")
    assert [reader.text for reader in disturbed] == [reader.text for reader in undisturbed]
    pauses = [round(reader.pause_s, 2) for reader in disturbed]
    print("longest pauses", pauses, "undisturbed", [round(r.pause_s, 2) for r in undisturbed])
    assert max(pauses) < PAUSE_S_MAX
    assert "request migrates" in stack.log("scheduler-0")
