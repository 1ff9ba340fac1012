"""What keeps a process from starting, and the probes of one that has started."""

from __future__ import annotations

import asyncio
import socket
import sys
from asyncio.subprocess import PIPE, STDOUT

import aiohttp
import msgspec
import pytest
from tests.support.memory_bus import MemoryBroker, MemoryTransport
from tests.support.nats import NatsServer
from tests.support.services import running
from tests.unit.gateway.cluster import settings

from antiphon.gateway.service import GatewayService
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
from antiphon.wire.base import Attempt, Process, Term
from antiphon.wire.heartbeat import RunningRequest
from antiphon.wire.ids import Incarnation, InstanceId, new_request_id
from antiphon.wire.submit import OpenRequest

HANGING = """
import threading, time
from contextlib import asynccontextmanager
from antiphon.service.main import run
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

run(Refused())
"""


@pytest.mark.timeout(60)
async def test_a_refused_start_ends_with_its_reason_though_a_thread_hangs() -> None:
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


def test_an_address_that_is_not_ours_is_named_in_one_line() -> None:
    with pytest.raises(CannotStart, match=r"port 192\.0\.2\.1:0"):
        bind("192.0.2.1", 0)


SCHEDULER = Process(
    instance=InstanceId("scheduler-of-a-long-name-0"), incarnation=Incarnation("f" * 16)
)
ATTEMPT = Attempt(term=Term(number=2**31, scheduler=SCHEDULER), n=2**31)


def test_what_a_line_is_taken_to_need_is_enough() -> None:
    line = OpenRequest(request_id=new_request_id(), deadline_unix_ms=2**50, attempt=ATTEMPT)
    held = RunningRequest(
        request_id=new_request_id(), attempt=ATTEMPT, tokens=2**31, ended=True, waiting=True
    )
    assert len(msgspec.msgpack.encode(line)) <= OPEN_ENTRY_BYTES
    assert len(msgspec.msgpack.encode(held)) <= HELD_ENTRY_BYTES


def test_the_largest_bound_that_fits_is_named_and_fits() -> None:
    with pytest.raises(CannotStart, match=r"queue = 9999: must be at most 836, .* 100000 bytes"):
        check_message_fits("queue", 9999, each_bytes=100, message_bytes_max=100_000)
    check_message_fits("queue", 836, each_bytes=100, message_bytes_max=100_000)


async def test_a_gateway_with_more_requests_than_its_list_can_name_does_not_start() -> None:
    chosen = settings(requests_max=100_000)
    with pytest.raises(ExceptionGroup) as raised:
        async with running(GatewayService, MemoryTransport(MemoryBroker()), settings=chosen):
            pass
    assert raised.group_contains(CannotStart, match=r"gateway\.requests_max = 100000")


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
