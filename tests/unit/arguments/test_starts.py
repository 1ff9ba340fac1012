"""What SGLang arguments do to services that start, and which describe what holds anyway."""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import huggingface_hub
import pytest
from aiohttp import web
from tests.arguments import compare, compare_async, shows
from tests.unit.config.test_resolve import CARD, DEVICE

from antiphon.config.load import ProcessArguments
from antiphon.model_card import hub
from antiphon.model_worker.observability.watchdog import StallDetector, StallVerdict
from antiphon.resolve.resolved_config import resolve
from antiphon.service import main as service_main
from antiphon.service.tasks import Tasks
from antiphon.service.web import web_server
from antiphon.telemetry import export
from antiphon.tokenizer.encoding import Batcher

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from antiphon.config.settings import Settings


@pytest.mark.parametrize(
    ("flag", "value", "at"), [shows("--host", "127.0.0.3", 0), shows("--port", "0", 1)]
)
async def test_argument_is_where_the_gateway_listens(flag: str, value: str, at: int) -> None:
    async def address(settings: Settings) -> object:
        runner = web.AppRunner(web.Application())
        gateway = settings.gateway
        async with web_server(runner, gateway.host, gateway.port):
            return runner.addresses[0][at]

    base = ("--port", "0") if flag == "--host" else ("--port", str(_free_port()))
    given, without = await compare_async(flag, value, observe=address, base=base)
    assert (given == "127.0.0.3") if flag == "--host" else without == int(base[1])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


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
        batching = settings.batching
        watchdog = StallDetector(stall_s=batching.stall_s, limit_s=batching.stall_limit_s)
        watchdog.observe(1, 0.0)
        return watchdog.observe(1, 100.0) is StallVerdict.HUNG

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
