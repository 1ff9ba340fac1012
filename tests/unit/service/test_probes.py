"""Health over real HTTP."""

from __future__ import annotations

import aiohttp
import pytest

from antiphon.service.startup import CannotStart, bind
from antiphon.service.web import ProcessHealth, probe_server
from antiphon.telemetry.metrics import Metrics


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


async def test_a_taken_port_is_named_in_one_line() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CannotStart, match=f"port 127.0.0.1:{port}: Address already in use"):
            async with probe_server(ProcessHealth(), Metrics(), host="127.0.0.1", port=port):
                pass


def test_an_address_that_is_not_ours_is_named_in_one_line() -> None:
    with pytest.raises(CannotStart, match=r"port 192\.0\.2\.1:0"):
        bind("192.0.2.1", 0)
