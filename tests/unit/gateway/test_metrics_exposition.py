"""The metrics of a model are those of all its processes."""

from __future__ import annotations

import math

import msgspec
import pytest
from tests.unit.gateway.metrics_page import Door, labels_of, value, worker

from antiphon.config.settings import Settings
from antiphon.gateway import metrics_exposition
from antiphon.gateway.request_metrics import SETS_MAX, CustomLabels
from antiphon.telemetry import catalog
from antiphon.wire.heartbeat import MetricFamily, MetricSeries
from antiphon.wire.ids import ModelName

RANKS = {"engine_type": "unified", "tp_rank": "0", "pp_rank": "0", "dp_rank": "0"}
NAMED = {"model_name": "toy", **RANKS}


@pytest.fixture
def door() -> Door:
    return Door(Settings())


def test_counters_and_histograms_are_added_over_processes(door: Door) -> None:
    door.model.take(worker("worker-0", tokens=5))
    door.model.take(worker("worker-1", tokens=7))
    door.model.take(worker("worker-1", tokens=9))
    page = door.read()
    assert value(page, "antiphon_realtime_tokens_total", mode="decode") == 14
    assert value(page, "sglang:realtime_tokens_total", mode="decode", **NAMED) == 14
    assert value(page, "antiphon_step_seconds_count") == 14
    assert value(page, "antiphon_step_seconds_bucket", le="0.0025") == 0
    assert value(page, "antiphon_step_seconds_bucket", le="0.005") == 14
    assert value(page, "antiphon_step_seconds_sum") == pytest.approx(14 * 0.003)


def test_restart_lowers_no_counter_and_doubles_no_gauge(door: Door) -> None:
    door.model.take(worker("worker-0", "1", tokens=5, running=3))
    door.model.take(worker("worker-0", "2", tokens=1, running=1))
    page = door.read()
    assert value(page, "antiphon_realtime_tokens_total") == 6
    assert value(page, "antiphon_num_running_reqs") == 1


def test_gauges_are_added_or_averaged_over_processes_that_live(door: Door) -> None:
    door.model.take(worker("worker-0", running=3, usage=0.2))
    door.model.take(worker("worker-1", running=1, usage=0.6))
    page = door.read()
    assert value(page, "sglang:num_running_reqs", **NAMED) == 4
    assert value(page, "sglang:token_usage", **NAMED) == pytest.approx(0.4)
    assert value(page, "sglang:full_token_usage") == pytest.approx(0.4)
    door.now += metrics_exposition.FRESH_S + 0.1
    door.model.take(worker("worker-1", running=2, tokens=1))
    page = door.read()
    assert value(page, "antiphon_num_running_reqs") == 2
    assert value(page, "antiphon_realtime_tokens_total") == 1
    assert list(door.model.ports()) == ["gateway-0", "worker-1"]


def test_reports_that_cannot_be_used_are_counted_and_ignored(door: Door) -> None:
    good = worker("worker-0", tokens=1)
    door.model.take(msgspec.structs.replace(good, model=ModelName("other")))
    strange = (
        MetricFamily(name="realtime_tokens_total", series=(MetricSeries(labels=(), value=1.0),)),
        MetricFamily(
            name="realtime_tokens_total",
            series=(MetricSeries(labels=("decode",), value=math.inf),),
        ),
        MetricFamily(
            name="step_seconds",
            bounds=(1.0, 2.0),
            series=(MetricSeries(value=1.0, counts=(1.0,)),),
        ),
        MetricFamily(name="of_a_later_version", series=(MetricSeries(value=1.0),)),
    )
    door.model.take(msgspec.structs.replace(good, families=strange))
    page = door.read()
    assert not labels_of(page, "antiphon_realtime_tokens_total")
    assert not labels_of(page, "antiphon_step_seconds_count")
    assert door.model.rejected == 3


def test_more_processes_than_there_is_room_for_lose_no_count(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_exposition, "PROCESSES_MAX", 2)
    for number in range(5):
        door.model.take(worker(f"worker-{number}", tokens=1))
    assert door.model.rejected == 3, "none has been silent for long"
    for number in range(2, 5):
        door.now += metrics_exposition.FORGET_S + 1
        door.model.take(worker(f"worker-{number}", tokens=1))
    assert value(door.read(), "antiphon_realtime_tokens_total") == 5
    door.model.take(worker("worker-1", tokens=8))
    assert value(door.read(), "antiphon_realtime_tokens_total") == 5, "it would count twice"


def test_request_is_counted_under_sglangs_names(door: Door) -> None:
    door.serve()
    page = door.read()
    assert value(page, "sglang:num_requests_total", model_name="toy") == 1
    assert value(page, "sglang:prompt_tokens_total") == 40
    assert value(page, "sglang:generation_tokens_total") == 3
    assert value(page, "sglang:cached_tokens_total", cache_source="device") == 10
    assert value(page, "sglang:time_to_first_token_seconds_sum") == pytest.approx(0.3)
    assert value(page, "sglang:inter_token_latency_seconds_count") == 2
    assert value(page, "sglang:inter_token_latency_seconds_sum") == pytest.approx(0.6)
    per_token = "sglang:request_time_per_output_token_seconds_sum"
    assert value(page, per_token) == pytest.approx(0.3)
    assert value(page, "sglang:e2e_request_latency_seconds_sum") == pytest.approx(0.9)
    assert value(page, "antiphon_num_requests_total") == 1
    assert not [name for name, _ in page if "tenant" in name]
    assert [name for name, _ in door.read(private=True) if "tenant" in name]


def test_stages_of_a_request_have_sglangs_names_and_labels(door: Door) -> None:
    door.serve()
    page = door.read()
    name = "sglang:per_stage_req_latency_seconds"
    seconds = {"tokenize": 0.1, "api_server_dispatch": 0.05, "request_process": 0.75}
    for stage, expected in seconds.items():
        assert value(page, f"{name}_sum", stage=stage) == pytest.approx(expected)
        assert value(page, f"{name}_count", stage=stage, **NAMED) == 1
    assert {labels["stage"] for labels in labels_of(page, f"{name}_count")} == set(seconds)


def test_processor_time_of_workers_is_that_of_sglangs_schedulers(door: Door) -> None:
    name = "sglang:scheduler_process_cpu_seconds_total"
    door.serve()
    assert not labels_of(door.read(), name)
    door.metrics.counter(catalog.PROCESS_CPU).labels("gateway").inc(5)
    door.model.take(worker("worker-0"))
    door.model.take(worker("worker-1"))
    page = door.read()
    assert value(page, name) == 4
    assert labels_of(page, name) == [NAMED]
    assert value(page, "sglang:process_cpu_seconds_total") == 9


def test_custom_labels_are_bounded_and_those_not_allowed_ignored() -> None:
    config = msgspec.structs.replace(Settings().metrics, custom_labels="team,user")
    labels = CustomLabels(config)
    labels.read({"x-custom-labels": '{"team": "red", "color": "blue", "user": 7}'})
    assert labels.current() == ("red", "7")
    labels.read({})
    assert labels.current() == ("", ""), "the request before it on the connection had some"
    for bad in ("no json", "[1]", '{"team": {"a": 1}}'):
        labels.read({"x-custom-labels": bad})
        assert labels.current() == ("", "")
    for number in range(SETS_MAX):
        labels.read({"x-custom-labels": f'{{"team": "{number}"}}'})
    assert labels.current() == ("other", "other")
