"""Processes die; the stack does not, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from typing import Self

import pytest
from openai import APIError, OpenAI
from tests.system.cutting import linked_stack
from tests.system.stack import (
    SERVICES,
    Stack,
    pages_in_use,
    processes,
    run_antiphon,
    serving,
    wait_until,
)

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

RESTARTED_WITHIN_S = 3.0
DEADLINE_S = 60.0
STREAMS = 4
_ABSENT = {"unavailable"}
_CLOSED = {"APIConnectionError", "RemoteProtocolError", "ReadError", "cut"}
FAILURES = {
    "gateway-0": _CLOSED | _ABSENT,
    "tokenizer-0": _ABSENT,
    "scheduler-0": _ABSENT,
    "worker-0": set[str](),
    "detokenizer-0": set[str](),
    "encoder-0": set[str](),
    "kv_storage-0": set[str](),
}
"""How requests may fail when a service is killed: by the code of the error, or a connection."""


def test_seven_services_and_a_broker_are_ready_in_time(stack: Stack):
    assert set(stack.pids()) == set(SERVICES)
    brokers = [c for _, c in processes() if "nats-server" in c and str(stack.logs.parent) in c]
    assert len(brokers) == 1
    assert stack.healthy()


def ask(client: OpenAI, model: str) -> str:
    """Ask a streamed question; return how it ended: the code of an error, or what broke off."""
    try:
        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Count from 1 to 20."}],
            stream=True,
        )
        return "ended" if [chunk.choices[0].finish_reason for chunk in stream][-1] else "cut"
    except APIError as error:
        return str(error.code or type(error).__name__)
    except Exception as error:  # noqa: BLE001  # a connection that the gateway's death closed
        return type(error).__name__


class Load:
    def __init__(self, stack: Stack, clients: int) -> None:
        self.outcomes: list[tuple[str, float]] = []
        self._stack = stack
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(clients)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), "a request hangs"

    def _run(self) -> None:
        with OpenAI(
            base_url=f"{self._stack.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S
        ) as client:
            while not self._stop.is_set():
                began = time.monotonic()
                outcome = ask(client, self._stack.model)
                self.outcomes.append((outcome, time.monotonic() - began))
                if outcome != "ended":
                    self._stop.wait(0.05)

    def count(self, outcome: str) -> int:
        return sum(o == outcome for o, _ in self.outcomes)


OFTEN = ("worker-0", "gateway-0", "encoder-0")
"""Services that are killed in every run; tests/faults kills the others in every run, too."""


@pytest.mark.parametrize(
    "victim",
    [pytest.param(name, marks=() if name in OFTEN else pytest.mark.long) for name in SERVICES],
)
def test_a_killed_service_is_started_again_and_everything_ends(stack: Stack, victim: str):
    wait_until(stack.healthy, 30, "healthy before the kill")
    with Load(stack, clients=4) as load:
        wait_until(lambda: load.count("ended") >= 4, 30, "requests before the kill")
        pid = stack.pid(victim)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wait_until(
            lambda: stack.pid(victim) not in {None, pid}, RESTARTED_WITHIN_S, f"{victim} again"
        )
        wait_until(stack.healthy, 30, f"healthy after {victim}")
        done = load.count("ended")
        wait_until(lambda: load.count("ended") >= done + 4, 60, "requests after the kill")
    failures = {outcome for outcome, _ in load.outcomes} - {"ended"}
    assert failures <= FAILURES[victim], failures
    assert max(took for _, took in load.outcomes) < DEADLINE_S
    wait_until(lambda: pages_in_use(stack) == 0, 30, "no pages in use")


class Reader(threading.Thread):
    def __init__(self, stack: Stack, number: int) -> None:
        super().__init__()
        self.text = ""
        self.error: Exception | None = None
        self._stack = stack
        self._number = number

    def run(self) -> None:
        try:
            with OpenAI(base_url=f"{self._stack.url}/v1", api_key="none", max_retries=0) as client:
                stream = client.completions.create(
                    model=self._stack.model,
                    prompt=f"Count from {self._number} to 900:",
                    max_tokens=700,
                    temperature=0,
                    stream=True,
                    timeout=DEADLINE_S,
                    extra_body={"ignore_eos": True},
                )
                for chunk in stream:
                    self.text += chunk.choices[0].text
        except Exception as error:  # noqa: BLE001  # whatever it is, the test names it
            self.error = error


def read(stack: Stack) -> list[str]:
    """Return what four clients read."""
    readers = [Reader(stack, number) for number in range(STREAMS)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(DEADLINE_S)
        assert not reader.is_alive(), "a request hangs"
    assert [reader.error for reader in readers] == [None] * len(readers)
    return [reader.text for reader in readers]


@pytest.mark.parametrize("pause_s", [pytest.param(4.0, marks=pytest.mark.long), 10.0])
async def test_streams_of_a_gateway_that_pauses_are_complete(pause_s: float):
    async with linked_stack() as bed:
        undisturbed = await asyncio.to_thread(read, bed.stack)
        gateway = bed.stack.pid("gateway-0")
        assert gateway is not None
        async with (
            bed.hitting(["gateway-0"], streams=STREAMS, fate=signal.SIGSTOP) as hit,
            asyncio.TaskGroup() as group,
        ):
            reading = group.create_task(asyncio.to_thread(read, bed.stack))
            async with asyncio.timeout(DEADLINE_S):
                await hit.happened.wait()
            await asyncio.sleep(pause_s)
            os.kill(gateway, signal.SIGCONT)
        assert reading.result() == undisturbed
        await asyncio.to_thread(
            wait_until, lambda: pages_in_use(bed.stack) == 0, 30, "no pages in use"
        )


def test_a_killed_supervisor_leaves_no_process_behind():
    with serving() as running:
        folder = str(running.logs.parent)
        running.process.kill()
        running.process.wait()
        wait_until(lambda: not [c for _, c in processes() if folder in c], 10, "everything gone")


def test_a_taken_port_is_named_at_once(stack: Stack):
    port = stack.url.rpartition(":")[2]
    result = run_antiphon("serve", "--port", port, timeout_s=20)
    assert result.returncode == 1
    assert f"port {port}" in result.stdout + result.stderr
    assert "Traceback" not in result.stdout + result.stderr
