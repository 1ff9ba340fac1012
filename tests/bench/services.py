"""The services as processes, with the echo worker in the worker's place, and their metrics."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import urllib.request
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from tests.system.stack import Stack, heartbeats, wait_until

from antiphon.config.load import child_environment, write_yaml
from antiphon.config.settings import Settings
from antiphon.supervisor.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PACED_WORKER = "tests.support.echo_worker"
GATEWAY = "antiphon.gateway"
MODULES = {
    "scheduler-0": "antiphon.scheduler",
    "tokenizer-0": "antiphon.tokenizer",
    "detokenizer-0": "antiphon.detokenizer",
}
STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class EchoStack:
    url: str
    logs: Path
    pids: dict[str, int]


@contextmanager
def echo_stack(
    nats_url: str,
    step_s: float = 0.0,
    *,
    worker: str = PACED_WORKER,
    gateway: str = GATEWAY,
    settings: Mapping[str, Mapping[str, object]] | None = None,
) -> Iterator[EchoStack]:
    """Run five services on a broker until left; logs are JSON, for the breakdown.

    `worker` and `gateway` are the modules that run in their place; `settings` are by section.
    """
    port = free_port("127.0.0.1")
    merged = msgspec.convert(
        {
            **(settings or {}),
            "bus": {"url": nats_url},
            "gateway": {"port": port},
            "telemetry": {"log_format": "json"},
        },
        Settings,
    )
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        logs = Path(folder)
        config = logs / "settings.yaml"
        write_yaml(merged, config)
        environment = {**child_environment(merged), "STEP_S": str(step_s)}
        pids = {
            instance: stack.enter_context(_process(module, instance, config, logs, environment))
            for instance, module in {"worker-0": worker, **MODULES, "gateway-0": gateway}.items()
        }
        url = f"http://127.0.0.1:{port}"
        probe = Stack(None, url, "", nats_url, logs, 0.0)  # pyright: ignore[reportArgumentType]
        try:
            wait_until(probe.healthy, 30, "the echo stack")
        except AssertionError as error:
            output = "".join(file.read_text()[-2000:] for file in sorted(logs.glob("*.log")))
            raise AssertionError(f"{error}\n{output}") from error
        yield EchoStack(url, logs, pids)


@contextmanager
def _process(
    module: str, instance: str, config: Path, logs: Path, environment: dict[str, str]
) -> Iterator[int]:
    command = ("-m", module, "--config", str(config), "--instance", instance)
    parent = ("--parent-pid", str(os.getpid()))
    with (logs / f"{instance}.log").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *command, *parent],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
        )
    try:
        yield process.pid
    finally:
        process.terminate()
        process.wait(STOP_TIMEOUT_S)


def scrape(url: str) -> dict[str, float]:
    """Return every sample of a service, by its name with its labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=5) as reply:
        lines = reply.read().decode().splitlines()
    samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}


async def metrics_urls(stack: Stack) -> dict[str, str]:
    """Return where each service shows its metrics, from its heartbeat."""
    names = stack.pids().keys()
    beats = await heartbeats(stack.nats_url, lambda beats: names <= beats.keys())
    return {name: f"http://127.0.0.1:{beat.health_port}" for name, beat in beats.items()}
