"""What `antiphon serve` listens to, and what it refuses before it starts anything."""

from __future__ import annotations

import asyncio
import signal
import socket
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace
from rich.console import Console
from tests.arguments import settings_of
from tests.support.nats import NatsServer

from antiphon.bus.bus import Bus
from antiphon.bus.nats import NatsTransport
from antiphon.cli.serve import stop_signals
from antiphon.config.errors import ConfigError
from antiphon.config.settings import Settings
from antiphon.resolve.device import HostDevice
from antiphon.supervisor.stack import CannotServe, ServiceStack
from antiphon.wire.base import Process, ProcessState, Role
from antiphon.wire.heartbeat import Heartbeat
from antiphon.wire.ids import ClusterName, Incarnation, InstanceId
from antiphon.wire.routes import HEARTBEAT

if TYPE_CHECKING:
    from pathlib import Path


def test_sighup_stops_the_supervisor_except_under_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert signal.SIGHUP in stop_signals()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert stop_signals() == (signal.SIGINT, signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_process_gets_its_configured_drain_time(tmp_path: Path):
    settings = Settings()
    slow = replace(settings.service, drain_timeout_s=60.0)
    gateway = replace(settings.gateway, port=0)
    stack = ServiceStack(
        replace(settings, service=slow, gateway=gateway), tmp_path, Console(quiet=True)
    )
    with pytest.raises(ConfigError, match=r"stop_timeout_s = 25: .*drain_timeout_s = 60"):
        await stack.run(asyncio.Event(), asyncio.Event())
    assert list(tmp_path.iterdir()) == []


async def test_names_that_live_on_the_operators_broker_are_not_taken_from_them(tmp_path: Path):
    settings = Settings()
    async with NatsServer() as server, asyncio.TaskGroup() as group:
        settings = replace(
            settings,
            bus=replace(settings.bus, url=server.url),
            gateway=replace(settings.gateway, port=0),
        )
        heart = group.create_task(beat(settings))
        stack = ServiceStack(settings, tmp_path, Console(quiet=True))
        with pytest.raises(
            CannotServe, match=r"^another .* already runs worker-0; .* --cluster-name"
        ):
            await stack.run(asyncio.Event(), asyncio.Event())
        assert not heart.done()
        heart.cancel()
    assert list(tmp_path.iterdir()) == []


async def beat(settings: Settings) -> None:
    """Be the worker of another stack, until cancelled."""
    me = Process(instance=InstanceId("worker-0"), incarnation=Incarnation("1"))
    transport = NatsTransport(settings.bus, name=me.instance)
    async with Bus(transport, ClusterName(settings.cluster.name), me, party=Role.WORKER) as bus:
        while True:
            heartbeat = Heartbeat(
                role=Role.WORKER,
                process=me,
                state=ProcessState.READY,
                config_digest="",
                health_port=0,
                load=0,
                not_after_unix_ms=0,
            )
            bus.publish(HEARTBEAT, heartbeat, role=Role.WORKER, instance=me.instance)
            await asyncio.sleep(0.1)


async def refused(tmp_path: Path, *arguments: str) -> str:
    """Why a stack does not start with these arguments."""
    settings = settings_of("--port", "0", *arguments)
    machine = HostDevice(kind="cpu", cores=4, memory_bytes=1 << 40)
    stack = ServiceStack(settings, tmp_path, Console(), machine)
    with pytest.raises((CannotServe, ConfigError)) as caught:
        await stack.run(asyncio.Event(), asyncio.Event())
    return str(caught.value)


async def test_nats_port_that_is_taken_is_refused_before_anything_starts(tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        message = await refused(tmp_path, "--nats-port", str(port))
    assert message == f"port {port} is in use; choose another with --nats-port"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--ssl-certfile", "/none.pem"), "gateway.ssl_certfile: /none.pem: no such file"),
        (("--ssl-certfile", __file__), "not a certificate with its key"),
        (("--context-length", "99999"), "must not exceed the model's 2048"),
        (
            ("--context-length", "99999"),
            "--json-model-override-args '{\"max_position_embeddings\": 99999}'",
        ),
        (
            ("--hf-chat-template-name", "rag"),
            "model.chat_template_name (--hf-chat-template-name): the tokenizer has no template "
            "'rag', only default",
        ),
        (
            ("--chat-template", "/none.jinja"),
            "model.chat_template (--chat-template): /none.jinja: no such file",
        ),
    ],
)
async def test_files_of_the_settings_are_read_before_anything_starts(
    tmp_path: Path, arguments: tuple[str, ...], reason: str
):
    assert reason in await refused(tmp_path, *arguments)
    assert list(tmp_path.iterdir()) == []


def test_named_conversation_format_is_refused():
    with pytest.raises(ConfigError, match="chatml: refused: Named conversation formats"):
        settings_of("--chat-template", "chatml")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            ("--dp-size", "5"),
            "supervisor.workers = 5 (--dp-size): must be at most 4, the number of cores",
        ),
        (
            ("--tokenizer-worker-num", "6"),
            "supervisor.tokenizers = 6 (--tokenizer-worker-num): "
            "must be at most 4, the number of cores",
        ),
        (
            ("--detokenizer-worker-num", "7"),
            "supervisor.detokenizers = 7 (--detokenizer-worker-num): "
            "must be at most 4, the number of cores",
        ),
        (
            ("--dp-size", "4", "--max-running-requests", "3"),
            "batching.running_max = 3 (--max-running-requests): must be at least "
            "supervisor.workers = 4 (--dp-size), since workers share it",
        ),
    ],
)
async def test_more_processes_than_the_machine_holds_are_refused_before_anything_starts(
    tmp_path: Path, arguments: tuple[str, ...], reason: str
):
    assert await refused(tmp_path, *arguments) == reason
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "flag", ["--dp-size", "--data-parallel-size", "--tokenizer-worker-num", "--supervisor-workers"]
)
@pytest.mark.parametrize("count", ["0", "-1", "two"])
def test_number_of_processes_is_at_least_one(flag: str, count: str):
    with pytest.raises(ConfigError, match=rf"{flag}: .*: must be an integer >= 1"):
        settings_of(flag, count)


@pytest.mark.system
@pytest.mark.timeout(120)
async def test_service_that_is_refused_at_its_start_is_named_with_the_reason(tmp_path: Path):
    message = await refused(tmp_path, "--load-config-overrides", '{"num_hidden_layers": 1}')
    assert message.startswith("worker-0 cannot start: ")
    assert "unexpected: model.layers.1." in message
    assert "\n" not in message
