"""What SGLang arguments do to services that start: where they listen, how many, over TLS."""

from __future__ import annotations

import asyncio
import ssl
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import aiohttp
import huggingface_hub
import msgspec
import pytest
from aiohttp import web
from rich.console import Console
from tests.arguments import compare, compare_async, settings_of, shows
from tests.unit.arguments.certificates import Certificate, make
from tests.unit.config.test_resolve import CARD, DEVICE, GIB
from tests.unit.gateway.cluster import house

from antiphon.config.errors import ConfigError
from antiphon.config.load import ProcessArguments, load, write_yaml
from antiphon.model_card import hub
from antiphon.model_worker.observability.watchdog import LoopHung, LoopWatchdog
from antiphon.resolve.resolved_config import ResolvedConfig, resolve
from antiphon.service import main as service_main
from antiphon.service.tasks import Tasks
from antiphon.service.web import server_context, web_server
from antiphon.supervisor.ports import free_port
from antiphon.supervisor.stack import ServiceStack
from antiphon.telemetry import export
from antiphon.tokenizer.encoding import Batcher
from antiphon.wire.base import Role

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from antiphon.config.settings import Settings
    from antiphon.supervisor.child import Child


@pytest.mark.parametrize(
    ("flag", "value", "at"), [shows("--host", "127.0.0.3", 0), shows("--port", "0", 1)]
)
async def test_argument_is_where_the_gateway_listens(flag: str, value: str, at: int) -> None:
    async def address(settings: Settings) -> object:
        runner = web.AppRunner(web.Application())
        gateway = settings.gateway
        async with web_server(runner, gateway.host, gateway.port):
            return runner.addresses[0][at]

    base = ("--port", "0") if flag == "--host" else ("--port", str(free_port("127.0.0.1")))
    given, without = await compare_async(flag, value, observe=address, base=base)
    assert (given == "127.0.0.3") if flag == "--host" else without == int(base[1])


@pytest.mark.parametrize(
    ("flag", "value", "asked", "expected"),
    [
        shows("--revision", "v2", "revision", "v2"),
        shows("--download-dir", "/models", "cache_dir", "/models"),
    ],
)
def test_argument_reaches_the_hub(
    flag: str, value: str, asked: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Mapping[str, object]] = []

    def download(repo: str, **options: object) -> str:
        calls.append(options | {"repo": repo})
        return "/nowhere"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)

    def option(settings: Settings) -> object:
        hub.fetch("owner/name", settings.load, weights=False)
        return calls[-1][asked]

    assert compare(flag, value, observe=option) == (expected, None)


@pytest.mark.parametrize(
    ("flag", "value", "base"),
    [
        shows("--enable-trace", None, ()),
        shows("--otlp-traces-endpoint", "collector:4318", ("--enable-trace",)),
        shows("--oltp-traces-endpoint", "collector:4318", ("--enable-trace",)),
    ],
)
def test_argument_exports_traces(
    flag: str, value: str | None, base: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    monkeypatch.setattr(export, "start", lambda *, endpoint, **_: started.append(endpoint))
    monkeypatch.setattr(export, "stop", lambda _: None)

    def endpoints(settings: Settings) -> list[str]:
        started.clear()
        arguments = ProcessArguments(settings, "gateway-0", None)
        with service_main._traces("gateway", arguments):
            return list(started)

    typed = (flag,) if value is None else (flag, value)
    given, without = compare(*typed, observe=endpoints, base=base)
    assert given == [value or "localhost:4317"]
    assert without == (["localhost:4317"] if base else [])


@pytest.mark.argument("--watchdog-timeout")
def test_watchdog_timeout_ends_a_worker_that_hangs() -> None:
    def ends_after_100_s(settings: Settings) -> bool:
        loop: Any = SimpleNamespace(reading=None, thread=None, forward_thread=None)
        loop.progress_count = 1
        watchdog = LoopWatchdog(loop, settings.batching, lambda: None)
        watchdog.check(0.0)
        try:
            watchdog.check(100.0)
        except LoopHung:
            return True
        return False

    assert compare("--watchdog-timeout", "60", observe=ends_after_100_s) == (True, False)


@pytest.mark.argument("--dynamic-batch-tokenizer-batch-size")
async def test_dynamic_batch_tokenizer_batch_size_bounds_a_batch() -> None:
    async def largest(settings: Settings) -> int:
        """The most texts that the tokenizer encodes at once of those that wait."""
        sizes: list[int] = []

        def encode(texts: Sequence[int]) -> list[int]:
            sizes.append(len(texts))
            return list(texts)

        with ThreadPoolExecutor(1) as executor:
            batcher = Batcher[int, int](encode, executor, settings.tokenizer.batch_max)
            async with Tasks() as group:
                waiting = [group.create_task(batcher.submit(n)) for n in range(40)]
                await asyncio.sleep(0)
                group.create_task(batcher.run())
                await asyncio.gather(*waiting)
                await group.cancel(1.0)
        return max(sizes)

    given, without = await compare_async(
        "--dynamic-batch-tokenizer-batch-size", "5", observe=largest
    )
    assert (given, without) == (5, 32)


@pytest.mark.argument("--config")
def test_config_reads_a_file(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("batching:\n  running_max: 7\n")

    def running(settings: Settings) -> int:
        return resolve(settings, CARD, DEVICE).running_max.value

    assert compare("--config", str(file), observe=running) == (7, 64)


MACHINE = msgspec.structs.replace(DEVICE, memory_bytes=12 * GIB)
"""Six cores; the model takes 1 GiB."""


def children(settings: Settings, role: Role, folder: Path) -> list[Child]:
    """The processes of a service that `serve` starts on the machine."""
    stack = ServiceStack(settings, folder, Console(quiet=True), MACHINE)
    return [child for child in stack.children("nats://127.0.0.1:1") if child.role is role]


def settings_in(child: Child) -> Settings:
    """What a process reads that is started so."""
    write_yaml(child.settings, child.config)
    own = {name: text for name, text in child.environment.items() if name.startswith("ANTIPHON_")}
    return load(child.config, environ=own).settings


def plan_of(settings: Settings, folder: Path) -> ResolvedConfig:
    """What the last worker decides."""
    worker = children(settings, Role.WORKER, folder)[-1]
    return resolve(settings_in(worker), CARD, MACHINE)


@pytest.mark.parametrize(
    ("flag", "role"),
    [
        shows("--dp-size", Role.WORKER),
        shows("--data-parallel-size", Role.WORKER),
        shows("--tokenizer-worker-num", Role.TOKENIZER),
        shows("--detokenizer-worker-num", Role.DETOKENIZER),
    ],
)
def test_argument_is_the_number_of_processes(flag: str, role: Role, tmp_path: Path) -> None:
    def names(settings: Settings) -> list[str]:
        return [child.instance for child in children(settings, role, tmp_path)]

    given, without = compare(flag, "3", observe=names)
    assert given == [f"{role}-0", f"{role}-1", f"{role}-2"]
    assert without == [f"{role}-0"]


@pytest.mark.argument("--language-only")
def test_language_only_starts_no_encoder(tmp_path: Path) -> None:
    def started(settings: Settings) -> list[str]:
        return [child.instance for child in children(settings, Role.ENCODER, tmp_path)]

    assert compare("--language-only", None, observe=started) == ([], ["encoder-0"])


@pytest.mark.argument("--encoder-only")
def test_encoder_only_starts_encoders_that_have_the_hosts_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.node", lambda: "gpu1.rack")

    def started(settings: Settings) -> list[str]:
        every = (children(settings, role, tmp_path) for role in Role)
        return [child.instance for of_role in every for child in of_role]

    base = ("--supervisor-encoders", "2", "--bus-url", "nats://127.0.0.1:1")
    given, without = compare("--encoder-only", None, observe=started, base=base)
    assert given == ["encoder-gpu1-rack-0", "encoder-gpu1-rack-1"]
    assert {"encoder-0", "worker-0", "gateway-0"} < set(without)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--encoder-only", r"supervisor.encoder_only \(--encoder-only\): set bus.url"),
        (
            "--encoder-only --language-only --bus-url nats://127.0.0.1:1",
            r"supervisor.encoders = 0 \(--language-only\): .*nothing would be started",
        ),
    ],
)
async def test_encoders_alone_with_nothing_to_do_are_refused(
    line: str, said: str, tmp_path: Path
) -> None:
    stack = ServiceStack(settings_of(*line.split()), tmp_path, Console(quiet=True), MACHINE)
    with pytest.raises(ConfigError, match=said):
        await stack.run(asyncio.Event(), asyncio.Event())


@pytest.mark.argument("--enable-dp-attention")
def test_enable_dp_attention_makes_attention_groups_of_workers(tmp_path: Path) -> None:
    def started(settings: Settings) -> list[tuple[str, int]]:
        workers = children(settings, Role.WORKER, tmp_path)
        return [(each.instance, settings_in(each).parallel.attn_dp_size) for each in workers]

    base = ("--tp-size", "2", "--dp-size", "2")
    given, without = compare("--enable-dp-attention", None, observe=started, base=base)
    assert given == [("worker-0", 2)]
    assert without == [("worker-0", 1), ("worker-1", 1)]


def test_attention_groups_that_are_set_twice_are_refused(tmp_path: Path) -> None:
    line = "--tp-size 6 --dp-size 2 --attn-dp-size 3 --enable-dp-attention"
    with pytest.raises(ConfigError, match=r"parallel.attn_dp_size = 3 .*set one of them"):
        children(settings_of(*line.split()), Role.WORKER, tmp_path)


def test_workers_share_cores_and_running_requests(tmp_path: Path) -> None:
    def held(settings: Settings) -> tuple[int, int, int]:
        plan = plan_of(settings, tmp_path)
        return plan.threads.value, plan.running_max.value, plan.cache_pages.value

    given, without = compare("--dp-size", "3", observe=held)
    assert without == (6, 64, 64 * 512 // 64)
    assert given == (2, 64 // 3, 64 // 3 * 512 // 64)


@pytest.mark.parametrize(
    "pool",
    [
        ("--cache-memory-ratio", "0.5", "--cache-bytes-max", str(90 * GIB)),
        ("--cache-memory-ratio", "1", "--cache-bytes-max", str(GIB)),
        ("--mem-fraction-static", "0.5"),
    ],
)
def test_workers_share_the_memory_of_pages(pool: tuple[str, ...], tmp_path: Path) -> None:
    """The weights of each come off its own share."""

    def bytes_of_pages(settings: Settings) -> int:
        return plan_of(settings, tmp_path).cache_bytes.value

    base = ("--max-running-requests", "1000000000", *pool)
    given, without = compare("--dp-size", "3", observe=bytes_of_pages, base=base)
    weights, ratio = GIB, 1.0 if pool[0] == "--mem-fraction-static" else 0.5
    lost = 0 if str(GIB) in pool else ratio * (weights - weights / 3)
    assert given == pytest.approx(without / 3 - lost, rel=0.02)


@pytest.mark.parametrize("argument", ["--max-total-tokens", "--model-threads"])
def test_worker_has_what_is_given_for_each(argument: str, tmp_path: Path) -> None:
    plan = plan_of(settings_of("--dp-size", "3", argument, "1600"), tmp_path)
    if argument == "--max-total-tokens":
        assert plan.cache_tokens == 1600
    else:
        assert plan.threads.value == 1600


def test_tokenizers_encode_on_all_cores_together(tmp_path: Path) -> None:
    settings = settings_of("--tokenizer-worker-num", "3", "--tokenizer-threads", "5")
    threads = [
        settings_in(child).tokenizer.threads
        for child in children(settings, Role.TOKENIZER, tmp_path)
    ]
    assert threads == [2, 2, 2]


def test_single_process_of_a_service_has_the_whole_machine(tmp_path: Path) -> None:
    settings = settings_of("--tokenizer-threads", "5")
    for role in set(Role) - {Role.ENCODER}:
        (child,) = children(settings, role, tmp_path)
        assert settings_in(child) == msgspec.structs.replace(
            settings, bus=msgspec.structs.replace(settings.bus, url="nats://127.0.0.1:1")
        )


@pytest.mark.parametrize(
    ("line", "threads"),
    [
        ("", [3]),
        ("--supervisor-encoders 3", [1, 1, 1]),
        ("--supervisor-encoders 2 --dp-size 4", [1, 1]),
        ("--device cuda", [6]),
        ("--device cuda --supervisor-encoders 2", [3, 3]),
        ("--model-threads 1", [3]),
        ("--encoder-threads 5 --supervisor-encoders 2", [5, 5]),
    ],
)
def test_encoders_share_the_cores_with_workers_on_the_cpu(
    line: str, threads: list[int], tmp_path: Path
) -> None:
    started = children(settings_of(*line.split()), Role.ENCODER, tmp_path)
    assert [settings_in(child).encoder.threads for child in started] == threads


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def served(folder: Path) -> Certificate:
    return make(folder, "served", password="swordfish")


@pytest.fixture(scope="module")
def stranger(folder: Path) -> Certificate:
    return make(folder, "stranger")


async def health(settings: Settings, trusted: ssl.SSLContext | None) -> int | str:
    """The status of /health over https and, without `trusted`, over plain HTTP."""
    config = settings.gateway
    tls = {name: getattr(config, name) for name in config.__struct_fields__ if "ssl" in name}
    async with house(**tls) as at, aiohttp.ClientSession() as session:
        url = at.url if trusted is None else at.url.replace("http:", "https:")
        try:
            async with session.get(f"{url}/health", ssl=trusted or False) as reply:
                return reply.status
        except aiohttp.ClientError as error:
            return type(error).__name__


def arguments(served: Certificate) -> tuple[str, ...]:
    files = ("--ssl-certfile", str(served.certificate), "--ssl-keyfile", str(served.key))
    return (*files, "--ssl-keyfile-password", "swordfish")


@pytest.mark.argument("--ssl-certfile")
@pytest.mark.argument("--ssl-keyfile")
async def test_certificate_makes_the_api_https(served: Certificate) -> None:
    trusted = ssl.create_default_context(cafile=str(served.certificate))
    over_tls = await compare_async(
        *arguments(served), observe=lambda settings: health(settings, trusted)
    )
    assert over_tls == (200, "ClientConnectorSSLError")
    plain = await compare_async(*arguments(served), observe=lambda settings: health(settings, None))
    assert plain == ("ServerDisconnectedError", 200)


@pytest.mark.argument("--ssl-keyfile-password")
async def test_password_opens_the_key(served: Certificate) -> None:
    async def opened(settings: Settings) -> bool:
        try:
            return server_context(settings.gateway) is not None
        except ConfigError:
            return False

    given, without = await compare_async(
        *("--ssl-keyfile-password", "swordfish"), observe=opened, base=arguments(served)[:4]
    )
    assert (given, without) == (True, False)


@pytest.mark.argument("--ssl-ca-certs")
async def test_ca_certs_verify_clients(served: Certificate, stranger: Certificate) -> None:
    trusted = ssl.create_default_context(cafile=str(served.certificate))
    trusted.load_cert_chain(stranger.certificate, stranger.key)
    given, without = await compare_async(
        *("--ssl-ca-certs", str(served.certificate)),
        observe=lambda settings: health(settings, trusted),
        base=arguments(served),
    )
    assert without == 200
    assert given != 200, "a certificate of another authority was let in"
    nothing = ssl.create_default_context(cafile=str(served.certificate))
    optional = (*arguments(served), "--ssl-ca-certs", str(stranger.certificate))
    assert await health(settings_of(*optional), nothing) == 200
    assert await health(settings_of(*optional), trusted) == 200
    required = settings_of(*optional, "--gateway-ssl-client-required")
    assert await health(required, trusted) == 200
    assert await health(required, nothing) != 200


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ssl-keyfile", "/k"), r"ssl_keyfile requires gateway\.ssl_certfile"),
        (("--ssl-keyfile-password", "k"), r"ssl_keyfile_password requires gateway\.ssl_certfile"),
        (("--ssl-ca-certs", "/k"), r"ssl_ca_certs requires gateway\.ssl_certfile"),
        (("--gateway-ssl-client-required",), r"ssl_client_required requires gateway\.ssl_certfile"),
    ],
)
def test_halves_of_tls_are_refused(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        server_context(settings_of(*arguments).gateway)


def test_clients_are_asked_for_certificates_only_with_an_authority(stranger: Certificate) -> None:
    files = ("--ssl-certfile", str(stranger.certificate), "--ssl-keyfile", str(stranger.key))
    with pytest.raises(ConfigError, match="ssl_client_required requires"):
        server_context(settings_of(*files, "--gateway-ssl-client-required").gateway)
