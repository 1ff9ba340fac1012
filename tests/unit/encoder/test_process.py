"""`python -m antiphon.encoder` over a real nats-server, with and without a model."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support.nats import NatsServer
from tests.support.services import listening, process
from tests.unit.encoder.images import RED

from antiphon.bus.bus import Bus
from antiphon.bus.nats import NatsTransport
from antiphon.config.settings import BusConfig
from antiphon.service.clock import SystemClock, deadline_in
from antiphon.transfer.blobs import fetch
from antiphon.wire.base import ProcessState
from antiphon.wire.claim import EncodeImage
from antiphon.wire.errors import Unsupported
from antiphon.wire.ids import ClusterName, InstanceId, ModelName, new_request_id
from antiphon.wire.routes import ENCODE_IMAGE, HEARTBEAT

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

HEAVY = ("torch", "numpy", "PIL", "safetensors")
MODEL = ModelName("antiphon-small")
ENCODER = InstanceId("encoder-0")


@pytest.fixture
async def server() -> AsyncGenerator[NatsServer]:
    async with NatsServer() as server:
        yield server


@pytest.fixture
async def bus(server: NatsServer) -> AsyncGenerator[Bus]:
    transport = NatsTransport(BusConfig(url=server.url), name="test")
    async with Bus(transport, ClusterName("antiphon"), process("test")) as bus:
        yield bus


async def spawn(url: str, *flags: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "antiphon.encoder", "--instance", "encoder-0", "--bus-url", url, *flags),
        stderr=asyncio.subprocess.PIPE,
    )


@asynccontextmanager
async def encoder(
    server: NatsServer, bus: Bus, *flags: str
) -> AsyncGenerator[asyncio.subprocess.Process]:
    """A process that is ready, and is stopped at the end."""
    async with listening(bus, HEARTBEAT, role="encoder", instance=ENCODER) as beats:
        started = await spawn(server.url, *flags)
        try:
            async with asyncio.timeout(20):
                while (await beats.get()).state is not ProcessState.READY:
                    pass
            yield started
            started.send_signal(signal.SIGTERM)
            async with asyncio.timeout(10):
                _, log = await started.communicate()
            assert started.returncode == 0, log.decode()
        finally:
            if started.returncode is None:
                started.kill()
                await started.communicate()


def request(image: bytes) -> EncodeImage:
    return EncodeImage(
        request_id=new_request_id(),
        model=MODEL,
        image=image,
        deadline_unix_ms=deadline_in(10, SystemClock()),
    )


def mapped(pid: int) -> set[str]:
    """The packages whose libraries a process has loaded."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return {name for name in HEAVY if f"/site-packages/{name}/" in maps}


async def test_without_a_model_it_loads_no_torch_and_refuses(server: NatsServer, bus: Bus) -> None:
    async with encoder(server, bus) as process:
        for image in (RED, b"no image"):
            with pytest.raises(Unsupported, match=r"encoder\.model_path is not set"):
                await bus.call(ENCODE_IMAGE, request(image), timeout_s=5, encoder=ENCODER)
        assert mapped(process.pid) == set()


async def test_the_service_imports_without_torch() -> None:
    """Pure Python packages leave no library mapped, so ask the interpreter too."""
    code = (
        "import sys, antiphon.encoder.__main__; "
        f"sys.exit(', '.join({{*{HEAVY!r}}} & {{*sys.modules}}))"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stderr=asyncio.subprocess.PIPE
    )
    _, found = await process.communicate()
    assert found.decode().strip() == ""


async def test_with_a_model_it_embeds(server: NatsServer, bus: Bus, siglip: Path) -> None:
    async with encoder(server, bus, "--encoder-model-path", str(siglip)) as process:
        answer = await bus.call(ENCODE_IMAGE, request(RED), timeout_s=10, encoder=ENCODER)
        data = await fetch(answer.claim, timeout_s=5, bytes_max=10**6)
        assert len(data) == answer.tokens * answer.hidden * 4
        assert "torch" in mapped(process.pid)  # so the test without a model can fail


async def test_a_folder_without_a_model_is_one_line_and_exit_code_3(
    server: NatsServer, tmp_path: Path
) -> None:
    process = await spawn(server.url, "--encoder-model-path", str(tmp_path))
    async with asyncio.timeout(20):
        _, log = await process.communicate()
    assert process.returncode == 3
    assert f"encoder.model_path: {tmp_path}/config.json: No such file" in log.decode()
    assert "Traceback" not in log.decode()
