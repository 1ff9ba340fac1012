"""The run loop as a process of its own, over a real nats-server: its start, probes and end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
from asyncio.subprocess import PIPE, STDOUT
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import msgspec
import pytest
from tests.support.echo import MODEL, echo_request
from tests.support.nats import NatsServer
from tests.support.services import client_bus, listening, process
from tests.support.wait import until

from antiphon.bus.nats import NatsTransport
from antiphon.config.settings import BusConfig
from antiphon.service.clock import SystemClock
from antiphon.service.main import CANNOT_START
from antiphon.service.startup import (
    HELD_ENTRY_BYTES,
    OPEN_ENTRY_BYTES,
    CannotStart,
    address_for_others,
    bind,
    check_message_fits,
)
from antiphon.service.web import ProcessHealth, probe_server
from antiphon.telemetry.metrics import Metrics
from antiphon.wire.base import Attempt, ProcessState, Term
from antiphon.wire.errors import EngineError
from antiphon.wire.heartbeat import RunningRequest
from antiphon.wire.ids import ClusterName, new_request_id
from antiphon.wire.routes import HEARTBEAT, TOKENIZE
from antiphon.wire.submit import OpenRequest

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from antiphon.bus.bus import Bus
    from antiphon.wire.heartbeat import Heartbeat


CLOCK = SystemClock()
ECHO_0 = {"role": "tokenizer", "instance": "echo-0"}


@pytest.fixture
async def server() -> AsyncGenerator[NatsServer]:
    async with NatsServer() as server:
        yield server


@pytest.fixture
async def bus(server: NatsServer) -> AsyncGenerator[Bus]:
    transport = NatsTransport(BusConfig(url=server.url), name="test")
    async with client_bus(transport, cluster=ClusterName("antiphon")) as bus:
        yield bus


class Echo:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.health_port = 0
        self.log = ""

    async def ready(self, bus: Bus) -> None:
        """Wait for the heartbeat that says so."""
        async with listening(bus, HEARTBEAT, **ECHO_0) as beats, asyncio.timeout(10):
            while (beat := await beats.get()).state is not ProcessState.READY:
                pass
        self.health_port = beat.health_port

    async def open_calls(self, count: int) -> None:
        line = f'antiphon_calls_open{{route="tokenizer.encode"}} {float(count)}\n'
        async with asyncio.timeout(5):
            while line not in await self.metrics():
                pass

    async def metrics(self) -> str:
        _, text = await self.get("/metrics")
        return text

    async def get(self, path: str) -> tuple[int, str]:
        url = f"http://127.0.0.1:{self.health_port}{path}"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            return response.status, await response.text()

    async def ended(self, timeout_s: float = 10) -> int:
        async with asyncio.timeout(timeout_s):
            _, log = await self.process.communicate()
        self.log = log.decode()
        assert self.process.returncode is not None
        return self.process.returncode


@asynccontextmanager
async def echo(url: str, *flags: str) -> AsyncGenerator[Echo]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.support.echo", "--instance", "echo-0", "--bus-url", url, *flags),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield Echo(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def outcome(bus: Bus, after_s: float) -> str:
    request = echo_request(CLOCK, after_s=after_s)
    try:
        await bus.call(TOKENIZE, request, timeout_s=10, model=MODEL)
    except EngineError as error:
        return error.code
    return "ok"


@pytest.mark.parametrize(
    ("drain_timeout", "after_s", "expected"), [("10", 1.0, "ok"), ("0.2", 60, "unavailable")]
)
async def test_sigterm_answers_12_of_12(
    server: NatsServer, bus: Bus, drain_timeout: str, after_s: float, expected: str
) -> None:
    async with (
        echo(server.url, "--service-drain-timeout-s", drain_timeout) as service,
        asyncio.TaskGroup() as group,
    ):
        await service.ready(bus)
        calls = [group.create_task(outcome(bus, after_s)) for _ in range(12)]
        await service.open_calls(12)
        service.process.send_signal(signal.SIGTERM)
        assert [await call for call in calls] == [expected] * 12
        assert await service.ended() == 0


async def test_restarted_broker_finds_the_service_again(server: NatsServer, bus: Bus) -> None:
    async with echo(server.url, "--service-heartbeat-s", "0.1") as service:
        await service.ready(bus)
        await server.kill()
        await server.start()
        await service.ready(bus)
        assert await outcome(bus, 0) == "ok"
        counted = re.search(r'antiphon_link_errors{kind="failed"} (\S+)', await service.metrics())
        assert counted is not None
        assert float(counted[1]) > 0


async def test_second_signal_ends_it_at_once(server: NatsServer, bus: Bus) -> None:
    async with echo(server.url) as service, asyncio.TaskGroup() as group:
        await service.ready(bus)
        call = group.create_task(outcome(bus, 60))
        await service.open_calls(1)
        service.process.send_signal(signal.SIGINT)
        async with asyncio.timeout(5):
            while (await service.get("/readyz"))[0] == 200:
                pass
        service.process.send_signal(signal.SIGTERM)
        assert await service.ended(2) == 128 + signal.SIGTERM
        call.cancel()


async def test_logs_are_json_lines_if_asked(server: NatsServer, bus: Bus) -> None:
    async with echo(server.url, "--telemetry-log-format", "json") as service:
        await service.ready(bus)
        service.process.send_signal(signal.SIGTERM)
        assert await service.ended() == 0
    events = [json.loads(line)["event"] for line in service.log.splitlines()]
    assert events == ["starting", "bus joined", "ready", "draining", "stopped"]


async def test_what_keeps_it_from_starting_is_one_line_and_an_exit_code(server: NatsServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        async with echo(server.url, "--health-port", port) as service:
            assert await service.ended() == 3
            assert f'reason="port 127.0.0.1:{port}: Address already in use"' in service.log
            assert "Traceback" not in service.log
        async with echo(server.url, "--service-slots", "0") as service:
            assert await service.ended() == 2
            assert service.log.startswith("antiphon tokenizer: --service-slots: service.slots = ")
            assert service.log.count("\n") == 1
        async with echo("") as service:
            assert await service.ended() == 3
            assert "--bus-url" in service.log


async def test_second_process_of_a_name_is_refused_beside_the_first(
    server: NatsServer, bus: Bus
) -> None:
    async with echo(server.url) as first:
        await first.ready(bus)
        async with echo(server.url) as second:
            assert await second.ended() == 3
            assert "cannot start" in second.log
            assert "the name echo-0 is taken by a live process" in second.log
            assert "Traceback" not in second.log
        assert await outcome(bus, 0) == "ok"
        first.process.kill()
        await first.ended()
    async with echo(server.url) as third:  # a process that was killed holds no name
        await third.ready(bus)
        assert await outcome(bus, 0) == "ok"


async def test_frozen_process_that_was_replaced_ends_awake(server: NatsServer, bus: Bus) -> None:
    quick = ("--service-heartbeat-s", "0.1")
    async with echo(server.url, *quick) as first:
        await first.ready(bus)
        first.process.send_signal(signal.SIGSTOP)
        async with echo(server.url, *quick) as second:
            await second.ready(bus)
            first.process.send_signal(signal.SIGCONT)
            assert await first.ended() == 4
            assert "the name echo-0 was taken by another process" in first.log
            assert "Traceback" not in first.log
            assert await outcome(bus, 0) == "ok"
            assert second.process.returncode is None


async def test_forged_heartbeats_of_its_name_end_no_process(server: NatsServer, bus: Bus) -> None:
    """Neither while it serves, nor when they were sent while it was frozen."""

    def forge(beat: Heartbeat) -> None:
        now_ms = CLOCK.unix_ms()
        for turn in range(50):
            forged = msgspec.structs.replace(
                beat,
                process=process("echo-0", f"forged-{turn % 3}"),
                sent_unix_ms=now_ms,
                not_after_unix_ms=now_ms + 2500,
            )
            bus.publish(HEARTBEAT, forged, **ECHO_0)

    async with echo(server.url, "--service-heartbeat-s", "0.1") as service:
        await service.ready(bus)
        async with listening(bus, HEARTBEAT, **ECHO_0) as beats:
            beat = await beats.get()
        forge(beat)
        assert await outcome(bus, 0) == "ok"
        service.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(0.5)  # the silence itself: it is suspect after 0.3 s
        forge(beat)
        service.process.send_signal(signal.SIGCONT)
        for _ in range(3):
            assert await outcome(bus, 0.2) == "ok"
        assert service.process.returncode is None


@pytest.mark.long
async def test_unreachable_broker_is_one_line_and_an_exit_code() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"nats://127.0.0.1:{silent.getsockname()[1]}"
        async with echo(url, "--bus-connect-timeout-s", "0.2") as service:
            assert await service.ended(20) == 3
    assert 'cannot start reason="no NATS server at' in service.log
    assert "Traceback" not in service.log


async def test_stop_while_it_looks_for_the_broker_ends_it() -> None:
    async with echo("nats://127.0.0.1:9") as service:
        assert service.process.stderr is not None
        async with asyncio.timeout(5):
            while b"starting" not in await service.process.stderr.readline():
                pass
            while b"bus failed" not in await service.process.stderr.readline():
                pass
        service.process.send_signal(signal.SIGTERM)
        assert await service.ended(3) == 0


async def test_process_ends_with_its_parent_even_if_killed(server: NatsServer, bus: Bus) -> None:
    script = (
        "import os, subprocess, sys, time\n"
        "command = [sys.executable, '-m', 'tests.support.echo', '--instance', 'echo-0',\n"
        f"           '--bus-url', {server.url!r}, '--parent-pid', str(os.getpid())]\n"
        "print(subprocess.Popen(command, stderr=subprocess.DEVNULL).pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    child = int(await parent.stdout.readline())
    await Echo(parent).ready(bus)
    parent.kill()
    await parent.communicate()
    async with asyncio.timeout(5):
        while await outcome(bus, 0) == "ok":
            pass
    await until(lambda: not _runs(child))


async def test_process_whose_parent_has_gone_does_not_start(server: NatsServer) -> None:
    async with echo(server.url, "--parent-pid", str(os.getppid())) as service:
        assert await service.ended() == 3
        assert f"parent {os.getppid()} has ended" in service.log


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # Killed, and not yet collected by its new parent.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


HANGING = """
import threading, time
from contextlib import asynccontextmanager
from antiphon.service import main
from antiphon.service.service import Report
from antiphon.service.startup import CannotStart
from antiphon.wire.base import Role

class Refused:
    role = Role.TOKENIZER
    @asynccontextmanager
    async def lifespan(self, runtime):
        threading.Thread(target=time.sleep, args=(600,)).start()
        raise CannotStart("no model of this kind is served")
        yield self
    def endpoints(self):
        return ()
    def model(self):
        return None
    def report(self):
        return Report(load=0)
    async def drain(self):
        pass

main._LEAVE_S = 0.2
main.run(Refused())
"""


@pytest.mark.timeout(60)
async def test_refused_start_ends_with_its_reason_though_a_thread_hangs() -> None:
    async with NatsServer() as nats:
        arguments = ("--bus-url", nats.url, "--instance", "tokenizer-0", "--health-port", "0")
        command = (sys.executable, "-c", HANGING, *arguments)
        ended = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=STDOUT)
        async with asyncio.timeout(50):
            written, _ = await ended.communicate()
    output = written.decode()
    assert "no model of this kind is served" in output
    assert ended.returncode == CANNOT_START, output
    assert "Timeout (" not in output


async def status(port: int, path: str) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}{path}") as response,
    ):
        return response.status, await response.text()


async def test_ready_means_ready_and_alive_means_alive() -> None:
    health = ProcessHealth()
    async with probe_server(health, Metrics(), host="127.0.0.1", port=0) as port:
        assert await status(port, "/readyz") == (503, "starting\n")
        health.ready()
        assert await status(port, "/readyz") == (200, "ready\n")
        health.draining()
        assert await status(port, "/readyz") == (503, "draining\n")
        assert await status(port, "/healthz") == (200, "ok\n")


async def test_metrics_are_served_in_prometheus_form() -> None:
    metrics = Metrics()
    metrics.calls.labels("tokenizer.encode", "ok").inc(3)
    async with probe_server(ProcessHealth(), metrics, host="127.0.0.1", port=0) as port:
        code, text = await status(port, "/metrics")
    assert code == 200
    assert 'antiphon_calls_total{outcome="ok",route="tokenizer.encode"} 3.0' in text
    assert "process_resident_memory_bytes" in text


def test_address_that_is_not_ours_is_named_in_one_line() -> None:
    with pytest.raises(CannotStart, match=r"port 192\.0\.2\.1:0"):
        bind("192.0.2.1", 0)


SCHEDULER = process("scheduler-of-a-long-name-0", "f" * 16)
ATTEMPT = Attempt(term=Term(number=2**31, scheduler=SCHEDULER), n=2**31)


def test_what_a_line_is_taken_to_need_is_enough() -> None:
    line = OpenRequest(request_id=new_request_id(), deadline_unix_ms=2**50, attempt=ATTEMPT)
    held = RunningRequest(
        request_id=new_request_id(),
        attempt=ATTEMPT,
        tokens=2**31,
        detokenizer=SCHEDULER.instance,
        detokenizer_incarnation=SCHEDULER.incarnation,
        ended=True,
        waiting=True,
    )
    assert len(msgspec.msgpack.encode(line)) <= OPEN_ENTRY_BYTES
    assert len(msgspec.msgpack.encode(held)) <= HELD_ENTRY_BYTES


def test_largest_bound_that_fits_is_named_and_fits() -> None:
    with pytest.raises(CannotStart, match=r"queue = 9999: must be at most 836, .* 100000 bytes"):
        check_message_fits("queue", 9999, each_bytes=100, message_bytes_max=100_000)
    check_message_fits("queue", 836, each_bytes=100, message_bytes_max=100_000)


@pytest.mark.parametrize(
    ("host", "advertise_host", "expected"),
    [
        ("127.0.0.1", "", "127.0.0.1"),
        ("0.0.0.0", "", socket.gethostname()),
        ("0.0.0.0", "node-3.cluster", "node-3.cluster"),
        ("127.0.0.1", "node-3.cluster", "node-3.cluster"),
    ],
)
def test_address_for_others_is_reachable(host: str, advertise_host: str, expected: str) -> None:
    with bind(host, 0) as listening:
        port = listening.getsockname()[1]
        assert address_for_others(listening, host, advertise_host) == f"{expected}:{port}"
