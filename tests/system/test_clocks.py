"""Two hosts with wall clocks apart: up to 5 s nothing differs; beyond, the other is refused."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from tests.bench.services import scrape
from tests.system.stack import (
    START_TIMEOUT_S,
    STOP_TIMEOUT_S,
    Stack,
    heartbeats,
    module_stack,
    wait_until,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

ROLES = {
    "worker-1": "antiphon.model_worker",
    "tokenizer-1": "antiphon.tokenizer",
    "detokenizer-1": "antiphon.detokenizer",
    "gateway-1": "antiphon.gateway",
}
REQUESTS = 12
TOKENS = 64
REFUSED, STEPS = "peers_refused_total", "step_seconds_count"

stack = module_stack("--enable-deterministic-inference", "--batching-running-max", "4")


@dataclass(frozen=True)
class Host:
    """Processes on another host, in the same cluster."""

    stack: Stack
    url: str
    logs: Path

    def log(self, instance: str) -> str:
        return (self.logs / f"{instance}.log").read_text(errors="replace")

    def healthy(self) -> bool:
        beside = Stack(self.stack.process, self.url, self.stack.model, "", self.logs, 0.0)
        return beside.healthy()

    def counts(self, name: str, *instances: str) -> dict[str, float]:
        """A metric of instances, on this host or the other one, with all its labels."""
        beats = asyncio.run(
            heartbeats(self.stack.nats_url, lambda beats: beats.keys() >= set(instances))
        )
        ports = {instance: beats[instance].health_port for instance in instances}
        pages = {each: scrape(f"http://127.0.0.1:{port}") for each, port in ports.items()}
        return {
            each: sum(value for sample, value in page.items() if f"antiphon_{name}" in sample)
            for each, page in pages.items()
        }


@contextmanager
def host(stack: Stack, ahead_s: float, logs: Path) -> Iterator[Host]:
    """Run a host whose clock is ahead until left."""
    port = int(stack.url.rpartition(":")[2]) + 1
    settings = str(stack.logs.parent / "settings.yaml")
    started: list[subprocess.Popen[bytes]] = []
    try:
        for instance, module in ROLES.items():
            command = [sys.executable, "-m", "tests.support.skewed_clock", str(ahead_s), module]
            command += ["--config", settings, "--instance", instance]
            command += ["--gateway-port", str(port)] if instance == "gateway-1" else []
            with (logs / f"{instance}.log").open("wb") as lines:
                started.append(subprocess.Popen(command, stdout=lines, stderr=lines))
        yield Host(stack, f"http://127.0.0.1:{port}", logs)
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(STOP_TIMEOUT_S)


async def ask(urls: list[str], model: str) -> list[tuple[str, str]]:
    """The texts and ends of the same requests, at these gateways in turn, all at once."""

    async def answer(session: aiohttp.ClientSession, number: int) -> tuple[str, str]:
        body = {
            "model": model,
            "prompt": f"Request {number}.",
            "seed": number,
            "temperature": 1,
            "max_tokens": TOKENS,
            "ignore_eos": True,
        }
        async with session.post(f"{urls[number % len(urls)]}/v1/completions", json=body) as reply:
            read: Mapping[str, Any] = await reply.json()
            assert reply.status == 200, read
            (choice,) = read["choices"]
            return choice["text"], choice["finish_reason"]

    async with aiohttp.ClientSession() as session:
        return await asyncio.gather(*(answer(session, number) for number in range(REQUESTS)))


def test_clocks_four_and_a_half_seconds_apart_change_nothing(stack: Stack, tmp_path: Path) -> None:
    expected = asyncio.run(ask([stack.url], stack.model))
    with host(stack, 4.5, tmp_path) as other:
        wait_until(other.healthy, START_TIMEOUT_S, "the other host")
        wait_until(lambda: '"worker-1"' in stack.get("/server_info"), START_TIMEOUT_S, "its worker")
        before = other.counts(STEPS, "worker-0", "worker-1")
        assert asyncio.run(ask([other.url, stack.url], stack.model)) == expected
        after = other.counts(STEPS, "worker-0", "worker-1")
        assert all(after[worker] > before[worker] for worker in before)


def test_clocks_six_seconds_apart_are_refused_and_lose_nothing(
    stack: Stack, tmp_path: Path
) -> None:
    expected = asyncio.run(ask([stack.url], stack.model))
    log = len(stack.log("scheduler-0"))
    with host(stack, 6.0, tmp_path) as other:
        wait_until(
            lambda: stack.log("scheduler-0")[log:].count("peer refused") >= 3,
            START_TIMEOUT_S,
            "refusals",
        )
        wait_until(
            lambda: other.counts(STEPS, "worker-1")["worker-1"] > 0,
            START_TIMEOUT_S,
            "the step of its warm-up",
        )
        before = other.counts(STEPS, "worker-1")
        assert asyncio.run(ask([stack.url], stack.model)) == expected
        assert other.counts(STEPS, "worker-1") == before
        assert other.counts(REFUSED, "scheduler-0")["scheduler-0"] > 0
        assert "the clock of its host differs too much" in stack.log("scheduler-0")[log:]
        assert not other.healthy()
    assert asyncio.run(ask([stack.url], stack.model)) == expected
