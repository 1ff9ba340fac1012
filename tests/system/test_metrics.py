"""One scrape of a gateway has the whole model: promtool, Prometheus and the dashboard read it."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import urllib.parse
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families
from tests.system.stack import SERVICES, Stack, read, serving, wait_until

from antiphon.supervisor.ports import free_port
from antiphon.telemetry.catalog import FAMILIES, Kind

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

DASHBOARD = Path(__file__).parents[2] / "compose/grafana/dashboards/antiphon.json"
COLON = "metric names should not contain ':'"
UNIT = "metric names should not contain abbreviated units"
TYPE = "metric name should not include type 'histogram'"
NAMED_BY_SGLANG = {
    "sglang:encoder_cache_size_mb": UNIT,
    "sglang:kv_cache_memory_usage_gb": UNIT,
    "sglang:weight_memory_usage_gb": UNIT,
    "sglang:prompt_tokens_histogram": TYPE,
    "sglang:uncached_prompt_tokens_histogram": TYPE,
    "sglang:generation_tokens_histogram": TYPE,
}
"""What promtool says of names that SGLang has fixed, beside the colon in all of them."""
HTTP = {"endpoint", "method"}
SCHEDULER = {"model_name", "engine_type", "tp_rank", "pp_rank", "dp_rank", "site"}
UNPACKED = Path(__file__).parents[2] / ".venv/prometheus/usr/bin"


def program(name: str) -> str:
    """Find a program of Debian's package `prometheus`: `make test-tools` brings it."""
    found = shutil.which(name) or shutil.which(name, path=str(UNPACKED))
    assert found is not None, f"{name} is missing: run make test-tools"
    return found


def lint(page: str) -> list[str]:
    """Return what promtool says of a page."""
    shown = subprocess.run(
        [program("promtool"), "check", "metrics"],
        input=page,
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    return [line for line in (shown.stdout + shown.stderr).splitlines() if line]


@dataclass(frozen=True)
class Prometheus:
    url: str

    def ask(self, expression: str) -> list[float]:
        """Evaluate an expression now; return the values of its series."""
        query = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"{self.url}/api/v1/query?{query}", timeout=10) as reply:
            result = json.load(reply)["data"]["result"]
        return [float(series["value"][1]) for series in result]


@contextmanager
def scraping(target: str, folder: Path) -> Iterator[Prometheus]:
    """Run a server until left. `target` is host and port."""
    config = folder / "prometheus.yaml"
    job = {"job_name": "antiphon", "static_configs": [{"targets": [target]}]}
    config.write_text(json.dumps({"global": {"scrape_interval": "500ms"}, "scrape_configs": [job]}))
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    command = [
        program("prometheus"),
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            server = Prometheus(f"http://{address}")
            wait_until(lambda: _up(server), 30, "prometheus scrapes")
            yield server
        finally:
            process.terminate()
            process.wait(20)


def _up(server: Prometheus) -> bool:
    try:
        return server.ask("up") == [1.0]
    except OSError:
        return False


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with serving(
        *("--metrics-port-base", "30700", "--decode-log-interval", "5"),
        *("--bucket-time-to-first-token", "0.5", "1", "2", "--collect-tokens-histogram"),
        *("--tokenizer-metrics-allowed-custom-labels", "team"),
        *("--extra-metric-labels", '{"site": "here"}'),
    ) as running:
        ask(running, team="red")
        yield running


def ask(stack: Stack, team: str | None = None) -> None:
    headers = {} if team is None else {"x-custom-labels": json.dumps({"team": team, "other": "x"})}
    with OpenAI(base_url=f"{stack.url}/v1", api_key="none", default_headers=headers) as client:
        answer = client.chat.completions.create(
            model=stack.model,
            messages=[{"role": "user", "content": "Count from 1 to 30."}],
            max_tokens=60,
        )
    assert answer.usage is not None


def samples(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def total(stack: Stack, name: str) -> float:
    return sum(value for _, value in samples(stack.get("/metrics")).get(name, []))


def whole(stack: Stack) -> str:
    """Wait until the worker's report of all that was generated has come, then read the page."""

    def arrived() -> bool:
        generated = total(stack, "sglang:generation_tokens_total")
        return 0 < generated <= total(stack, "sglang:realtime_tokens_total") and bool(
            total(stack, "sglang:queue_time_seconds_count")
        )

    wait_until(arrived, 20, "every service has reported")
    return stack.get("/metrics")


def test_promtool_finds_no_more_than_sglang_has_fixed(stack: Stack) -> None:
    for line in lint(whole(stack)):
        name, _, shown = line.partition(" ")
        assert name.startswith("sglang:"), line
        assert shown in (COLON, NAMED_BY_SGLANG.get(name)), line


def test_sglangs_names_have_sglangs_labels(stack: Stack) -> None:
    found = samples(whole(stack))
    requests = {labels.get("team") for labels, _ in found["sglang:num_requests_total"]}
    assert requests == {"red"}
    assert {"model_name", "team", "site"} == set(found["sglang:num_requests_total"][0][0])
    assert set(found["sglang:num_running_reqs"][0][0]) == SCHEDULER
    assert set(found["sglang:http_responses_total"][0][0]) == {*HTTP, "status_code", "site"}
    bounds = {labels["le"] for labels, _ in found["sglang:time_to_first_token_seconds_bucket"]}
    assert bounds == {"0.5", "1.0", "2.0", "+Inf"}
    ((labels, kept),) = found["sglang:max_total_num_tokens"]
    assert kept > 0
    assert labels["site"] == "here"
    counted = sum(value for _, value in found["sglang:generation_tokens_histogram_count"])
    assert counted == sum(value for _, value in found["sglang:num_requests_total"])
    started = {labels["phase"]: value for labels, value in found["sglang:startup_time_seconds"]}
    assert started["total"] == pytest.approx(started["load"] + started["warm_up"])
    assert started["load"] > 0
    for family in FAMILIES.values():
        if family.kind is Kind.COUNTER or family.name.startswith("encoder") or family.labels:
            continue  # counters of what has not happened, and of services that had nothing to do
        if family.name.startswith(("swa_", "mamba_")) or family.name.endswith("_swa"):
            continue  # this model has neither windows nor states
        for view in family.sglang:
            names = (f"sglang:{view.name}", f"sglang:{view.name}_count")
            assert any(name in found for name in names), view.name


def test_every_expression_of_the_dashboard_is_a_number(stack: Stack, tmp_path: Path) -> None:
    board = json.loads((DASHBOARD).read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(expressions) > 10
    with scraping(stack.url.removeprefix("http://"), tmp_path) as prometheus:

        def numbers() -> list[bool]:
            ask(stack)  # rates need something that grows while they look
            asked = [prometheus.ask(expression) for expression in expressions]
            return [bool(values) and all(map(math.isfinite, values)) for values in asked]

        wait_until(lambda: all(numbers()), 60, "every expression is a number")


def test_a_worker_that_restarts_lowers_no_counter(stack: Stack) -> None:
    before = samples(whole(stack))
    pid = stack.pid("worker-0")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: stack.pid("worker-0") not in (None, pid), 30, "the worker is back")
    wait_until(stack.healthy, 60, "the model is served again")
    ask(stack)
    name = "sglang:realtime_tokens_total"
    old = sum(value for _, value in before[name])
    wait_until(lambda: total(stack, name) > old, 20, "the new worker has reported")
    assert len(samples(stack.get("/metrics"))["sglang:token_usage"]) == 1


def test_each_process_has_a_port_of_its_own_for_metrics(stack: Stack) -> None:
    def listed() -> dict[str, int]:
        return json.loads(stack.get("/server_info"))["metrics_ports"]

    wait_until(lambda: set(listed()) == set(SERVICES), 10, "every process has reported")
    ports = listed()
    assert all(30700 <= port < 30800 for port in ports.values())
    assert len(set(ports.values())) == len(SERVICES)
    for name, port in ports.items():
        assert "process_cpu_seconds_total" in read(f"http://127.0.0.1:{port}/metrics"), name


def test_prefill_and_decode_lines_are_sglangs(stack: Stack) -> None:
    ask(stack)
    wait_until(lambda: "Decode batch, #running-req: 1, #token: " in stack.log("worker-0"), 10, "a")
    assert "Prefill batch, #new-seq: 1, #new-token: " in stack.log("worker-0")
