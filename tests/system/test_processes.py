"""Several processes of a service under one `antiphon serve` share the work and the machine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import TYPE_CHECKING

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.system.stack import START_TIMEOUT_S, Stack, read, serving, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

WORKERS = ("worker-0", "worker-1")
PORT_BASE = 31700


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    counts = ("--dp-size", "2", "--tokenizer-worker-num", "2", "--detokenizer-worker-num", "2")
    with serving(*counts, "--metrics-port-base", str(PORT_BASE)) as running:
        # The supervisor may have read the last heartbeat a moment before the gateway does.
        wait_until(lambda: known(running, *WORKERS), START_TIMEOUT_S, "both workers")
        yield running


def server_info(stack: Stack) -> Mapping[str, object]:
    return json.loads(stack.get("/server_info"))


def known(stack: Stack, *workers: str) -> bool:
    """Whether the gateway knows the capacity and the metrics port of each worker."""
    info = server_info(stack)
    states, ports = info["internal_states"], info["metrics_ports"]
    assert isinstance(states, list)
    assert isinstance(ports, dict)
    return ports.keys() >= set(workers) == {state["worker"] for state in states}


def decoded(stack: Stack, worker: str) -> float:
    """Tokens that a worker has decoded, by its own metrics."""
    ports = server_info(stack)["metrics_ports"]
    assert isinstance(ports, dict)
    page = read(f"http://127.0.0.1:{ports[worker]}/metrics")
    return sum(
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "antiphon_realtime_tokens_total" and sample.labels["mode"] == "decode"
    )


async def complete(stack: Stack, count: int) -> None:
    """Send that many requests at once; each has to end with all of its tokens."""
    async with aiohttp.ClientSession() as session:

        async def one(number: int) -> None:
            body = {
                "model": stack.model,
                "prompt": f"Count from {number}:",
                "max_tokens": 100,
                "ignore_eos": True,
            }
            async with session.post(f"{stack.url}/v1/completions", json=body) as reply:
                answer = await reply.json()
                assert reply.status == 200, answer
                assert answer["usage"]["completion_tokens"] == 100, answer

        await asyncio.gather(*map(one, range(count)))


def test_every_process_is_ready_and_has_a_metrics_port_from_the_base(stack: Stack) -> None:
    info = server_info(stack)
    names = ("dp_size", "tokenizer_worker_num", "detokenizer_worker_num")
    assert [info[name] for name in names] == [2, 2, 2]
    ports = info["metrics_ports"]
    assert isinstance(ports, dict)
    doubled = {f"{role}-{n}" for role in ("worker", "tokenizer", "detokenizer") for n in (0, 1)}
    assert doubled < ports.keys()
    assert len(set(ports.values())) == len(ports) == 10
    assert all(PORT_BASE <= port < PORT_BASE + 100 for port in ports.values())


def test_workers_share_running_requests(stack: Stack) -> None:
    states = server_info(stack)["internal_states"]
    assert isinstance(states, list)
    assert [(state["worker"], state["max_running_requests"]) for state in states] == [
        ("worker-0", 32),
        ("worker-1", 32),
    ]


async def test_every_worker_has_its_part_of_the_requests(stack: Stack) -> None:
    before = {worker: decoded(stack, worker) for worker in WORKERS}
    await complete(stack, 16)
    for worker in WORKERS:
        assert decoded(stack, worker) >= before[worker] + 4 * 99, worker


async def test_killed_worker_returns_and_the_other_serves_meanwhile(stack: Stack) -> None:
    pid = stack.pid("worker-1")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await complete(stack, 4)

    def works_again() -> bool:
        return known(stack, *WORKERS) and stack.pid("worker-1") not in (None, pid)

    wait_until(works_again, START_TIMEOUT_S, "the killed worker")
    before = decoded(stack, "worker-1")
    await complete(stack, 16)
    assert decoded(stack, "worker-1") > before
