"""A whole stack as an operator starts it: `antiphon serve`, real processes, a real nats-server."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from antiphon.bus.bus import Bus, Delivery
from antiphon.bus.nats import NatsTransport
from antiphon.config.settings import BusConfig
from antiphon.supervisor.ports import free_port
from antiphon.wire.base import Process
from antiphon.wire.ids import ClusterName, InstanceId, new_incarnation
from antiphon.wire.routes import HEARTBEAT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from antiphon.wire.heartbeat import Heartbeat

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 60.0
FIRST_PORT = 20_000
POLL_S = 0.05
PROGRAM = "antiphon.cli.main"
READY = re.compile(r"API (https?://\S+)/v1 · model (\S+) · NATS (\S+) · logs (\S+)")
SERVICES = (
    "gateway-0",
    "tokenizer-0",
    "scheduler-0",
    "worker-0",
    "detokenizer-0",
    "encoder-0",
    "kv_storage-0",
)


@dataclass(frozen=True)
class Stack:
    process: subprocess.Popen[str]
    url: str
    model: str
    nats_url: str
    logs: Path
    started_in_s: float

    def pid(self, instance: str) -> int | None:
        """Return the pid of a service's current life, if it lives."""
        for pid, command in processes():
            if f"--instance {instance} --parent-pid {self.process.pid} " in command:
                return pid
        return None

    def pids(self) -> dict[str, int]:
        found = {name: self.pid(name) for name in SERVICES}
        return {name: pid for name, pid in found.items() if pid is not None}

    def argument(self, flag: str) -> str:
        """Return the value that a flag was given."""
        command = self.process.args
        assert isinstance(command, list)
        return str(command[command.index(flag) + 1])

    def get(self, path: str) -> str:
        """Return what a path answers."""
        return read(self.url + path)

    def post(self, path: str, body: object, timeout_s: float = 60) -> Any:
        """Post JSON; return the JSON of the answer.

        Raises:
            HTTPError: It was refused.
        """
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return json.load(answer)

    def refusal(self, path: str, body: object) -> str:
        """Post JSON that must be refused as a bad request; return what is said."""
        with pytest.raises(urllib.error.HTTPError) as refused:
            self.post(path, body)
        with refused.value as error:
            assert error.code == 400
            return error.read().decode()

    def healthy(self) -> bool:
        """Whether the gateway says that it can serve."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def log(self, instance: str) -> str:
        path = self.logs / f"{instance}.log"
        return path.read_text(errors="replace") if path.exists() else ""


def read(url: str) -> str:
    """Return what a URL answers."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.read().decode()


def run_antiphon(*words: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    return subprocess.run(
        [sys.executable, "-m", "antiphon.cli.main", *words],
        capture_output=True,
        check=False,
        text=True,
        timeout=timeout_s,
    )


def module_stack(*arguments: str) -> Callable[..., Iterator[Stack]]:
    """Return a fixture of a module: a stack with these arguments."""

    @pytest.fixture(scope="module")
    def stack() -> Iterator[Stack]:
        with serving(*arguments) as running:
            yield running

    return stack


def processes() -> Iterator[tuple[int, str]]:
    """Yield every living process with its command line."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            except (OSError, UnicodeDecodeError):
                continue
            if state != "Z":
                yield int(folder.name), command


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> float:
    """Poll until something outside this process is true; return how long it took."""
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        assert waited < timeout_s, f"{what}: not within {timeout_s} s"
        time.sleep(POLL_S)
    return time.monotonic() - began


@contextmanager
def serving(
    *arguments: str,
    python: str = sys.executable,
    program: str = PROGRAM,
    environment: dict[str, str] | None = None,
) -> Iterator[Stack]:
    """Run `antiphon serve` on any free port until left, then stop it as Ctrl-C does.

    Raises:
        AssertionError: It did not start, or has left processes or its folder behind.
    """
    began = time.monotonic()
    process = subprocess.Popen(
        [python, "-um", program, "serve", *_own_ports(arguments), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=environment,
    )
    try:
        url, model, nats_url, logs = _ready_line(process).groups()
        started_in_s = time.monotonic() - began
        yield Stack(process, url, model, nats_url, Path(logs), started_in_s)
        if process.poll() is None:
            assert stop(process) == 0
            _assert_nothing_left(process.pid, str(Path(logs).parent))
    finally:
        stop(process)


@contextmanager
def second_gateway(stack: Stack) -> Iterator[str]:
    """Run `gateway-1` beside the gateway of a stack until left; yield its URL.

    Raises:
        AssertionError: It did not start.
    """
    port = free_port("127.0.0.1")
    command = [sys.executable, "-m", "antiphon.gateway"]
    command += ["--config", str(stack.logs.parent / "settings.yaml")]
    with (stack.logs / "gateway-1.log").open("wb") as lines:
        process = subprocess.Popen(
            [*command, "--gateway-port", str(port), "--instance", "gateway-1"],
            stdout=lines,
            stderr=lines,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        second = Stack(stack.process, url, stack.model, stack.nats_url, stack.logs, 0.0)
        wait_until(second.healthy, START_TIMEOUT_S, "the second gateway")
        yield url
    finally:
        process.terminate()
        process.wait(STOP_TIMEOUT_S)


def stop(process: subprocess.Popen[str]) -> int:
    """Stop a stack as Ctrl-C does; return its exit status."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        return process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise
    finally:
        if process.stdout is not None:
            process.stdout.close()


async def heartbeats(
    nats_url: str, enough: Callable[[dict[str, Heartbeat]], object], timeout_s: float = 10
) -> dict[str, Heartbeat]:
    """Listen until the latest heartbeats, by instance, are enough; return them.

    Raises:
        TimeoutError: They were not in time.
    """
    here = Process(instance=InstanceId("test"), incarnation=new_incarnation())
    latest: dict[str, Heartbeat] = {}
    complete = asyncio.Event()

    async def deliver(delivery: Delivery) -> None:
        beat = delivery.read(HEARTBEAT)
        latest[beat.process.instance] = beat
        if enough(latest):
            complete.set()

    transport = NatsTransport(BusConfig(url=nats_url), name="test")
    async with Bus(transport, ClusterName("antiphon"), here) as bus, asyncio.timeout(timeout_s):
        await bus.listen(HEARTBEAT, deliver)
        await complete.wait()
    return latest


def pages_in_use(stack: Stack) -> int:
    """Wait for the worker's next heartbeat, and return how many pages it has in use."""
    beats = asyncio.run(heartbeats(stack.nats_url, lambda beats: "worker-0" in beats))
    load = beats["worker-0"].worker
    assert load is not None
    return load.pages_total - load.pages_free


def _own_ports(arguments: Sequence[str]) -> list[str]:
    """Ports that no stack takes which is started beside this one by another process of pytest."""
    base = FIRST_PORT + 100 * (os.getpid() % 100)
    own = [] if "--metrics-port-base" in arguments else ["--metrics-port-base", str(base)]
    return ["--gateway-port", "0", *own]


def _assert_nothing_left(pid: int, folder: str) -> None:
    parent = f"--parent-pid {pid} "
    left = [line for at, line in processes() if at == pid or parent in line or folder in line]
    assert left == []
    assert not Path(folder).exists()


def _ready_line(process: subprocess.Popen[str]) -> re.Match[str]:
    assert process.stdout is not None
    said: list[str] = []
    for line in process.stdout:
        said.append(line)
        match = READY.search(line)
        if match:
            return match
    raise AssertionError("the stack did not start:\n" + "".join(said))
