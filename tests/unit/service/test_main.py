"""How a process ends that may not start."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, STDOUT

import pytest
from tests.support.nats import NatsServer

from antiphon.service.main import CANNOT_START

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
