"""What SGLang's arguments do to metrics and to the log lines of steps."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
from tests.arguments import compare, refusal, shows
from tests.unit.gateway.metrics_page import Door, Page, labels_of, value, worker

from antiphon.model_worker.batching.loop import StepReport
from antiphon.model_worker.batching.running_batch import Capacity
from antiphon.model_worker.observability.metrics import WorkerSize
from antiphon.model_worker.observability.step_accounting import StepAccounting
from antiphon.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from antiphon.config.settings import Settings

HEADERS = {"x-custom-labels": '{"team": "red"}', "x-labels": '{"team": "blue"}'}
ALLOWED = ("--tokenizer-metrics-allowed-custom-labels", "team")


def served(settings: Settings) -> Page:
    """The page of a gateway after a request, beside two workers."""
    door = Door(settings)
    door.serve(HEADERS)
    door.model.take(worker("worker-0", running=1))
    door.model.take(worker("worker-1", running=2))
    return door.read()


def bounds(page: Page, name: str) -> list[str]:
    return [labels["le"] for labels in labels_of(page, f"sglang:{name}_bucket")]


@pytest.mark.parametrize(
    ("flag", "words", "metric"),
    [
        shows("--bucket-time-to-first-token", "0.1 2", "time_to_first_token_seconds"),
        shows("--bucket-inter-token-latency", "0.1 2", "inter_token_latency_seconds"),
        shows("--bucket-e2e-request-latency", "0.1 2", "e2e_request_latency_seconds"),
        shows("--prompt-tokens-buckets", "custom 0.1 2", "prompt_tokens_histogram"),
        shows("--generation-tokens-buckets", "custom 0.1 2", "generation_tokens_histogram"),
    ],
)
def test_argument_sets_the_buckets(flag: str, words: str, metric: str) -> None:
    base = ("--collect-tokens-histogram",)
    given, without = compare(
        flag, *words.split(), observe=lambda settings: bounds(served(settings), metric), base=base
    )
    assert given == ["0.1", "2.0", "+Inf"]
    assert len(without) > 10


@pytest.mark.argument("--collect-tokens-histogram")
def test_collect_tokens_histogram_collects_tokens_of_requests() -> None:
    def counted(settings: Settings) -> list[float]:
        page = served(settings)
        names = ("prompt", "uncached_prompt", "generation")
        sums = (f"sglang:{name}_tokens_histogram_sum" for name in names)
        return [value(page, name) for name in sums if labels_of(page, name)]

    assert compare("--collect-tokens-histogram", observe=counted) == ([40, 30, 3], [])


@pytest.mark.parametrize(
    "flag",
    [
        shows("--tokenizer-metrics-allowed-custom-labels"),
        shows("--tokenizer-metrics-allowed-customer-labels"),
    ],
)
def test_argument_allows_custom_labels(flag: str) -> None:
    given, without = compare(flag, "team", "user", observe=request_labels)
    assert given == {"model_name": "toy", "team": "red", "user": ""}
    assert without == {"model_name": "toy"}


def request_labels(settings: Settings) -> dict[str, str]:
    (labels,) = labels_of(served(settings), "sglang:num_requests_total")
    return labels


@pytest.mark.argument("--tokenizer-metrics-custom-labels-header")
def test_custom_labels_header_is_the_one_that_is_read() -> None:
    given, without = compare(
        "--tokenizer-metrics-custom-labels-header",
        "x-labels",
        observe=lambda settings: request_labels(settings)["team"],
        base=ALLOWED,
    )
    assert (given, without) == ("blue", "red")


@pytest.mark.argument("--extra-metric-labels")
def test_extra_metric_labels_are_on_every_metric_of_the_model() -> None:
    def sites(settings: Settings) -> set[str | None]:
        return {dict(labels).get("site") for _, labels in served(settings)}

    given, without = compare("--extra-metric-labels", '{"site": "here"}', observe=sites)
    assert (given, without) == ({"here"}, {None})


@pytest.mark.argument("--enable-metrics-for-all-schedulers")
def test_metrics_for_all_schedulers_tells_workers_apart() -> None:
    def running(settings: Settings) -> dict[str, float]:
        page = served(settings)
        name = "sglang:num_running_reqs"
        ranks = [labels["dp_rank"] for labels in labels_of(page, name)]
        return {rank: value(page, name, dp_rank=rank) for rank in ranks}

    given, without = compare("--enable-metrics-for-all-schedulers", observe=running)
    assert (given, without) == ({"0": 1, "1": 2}, {"0": 3})


@pytest.mark.argument("--decode-log-interval")
def test_decode_log_interval_is_the_decodes_between_two_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    def lines(settings: Settings) -> int:
        caplog.clear()
        interval = settings.batching.decode_log_interval
        capacity = WorkerSize(pages_total=10, page_tokens=16)
        accounts = StepAccounting(Metrics(), capacity, None, interval)
        for step in range(1, 81):
            accounts.record(decode(step), float(step), ended=False)
        accounts.process_pending()
        return sum(record.message.startswith("Decode batch") for record in caplog.records)

    assert compare("--decode-log-interval", "10", observe=lines) == (8, 2)


def decode(step: int) -> StepReport:
    return StepReport(
        step=step,
        seconds=0.01,
        tokens=1,
        rows=1,
        progress=(),
        credit=Capacity(
            pages_free=4, pages_evictable=1, pages_promised=0, pages_returning=0, slots_free=0
        ),
        running=1,
        waiting=0,
        retractions=0,
    )


@pytest.mark.parametrize(
    ("argument", "words", "message"),
    [
        ("--bucket-time-to-first-token", "2 1", "must be finite and ascending"),
        ("--bucket-inter-token-latency", "a", "must be a list of numbers"),
        ("--prompt-tokens-buckets", "tse 1000 2", "`default`, `tse MIDDLE BASE COUNT`"),
        ("--prompt-tokens-buckets", "tse 1000 1 8", "a base > 1"),
        ("--generation-tokens-buckets", "custom", "`default`, `tse MIDDLE BASE COUNT`"),
        ("--extra-metric-labels", "[1]", "extra_labels: must be a JSON object"),
        ("--extra-metric-labels", '{"le":"a"}', "'le' is reserved"),
        ("--tokenizer-metrics-allowed-custom-labels", "a-b", "'a-b' is not a label name"),
        ("--tokenizer-metrics-custom-labels-header", "x y", "must be the name of an HTTP header"),
    ],
)
def test_argument_with_a_bad_value_says_what_is_allowed(
    argument: str, words: str, message: str
) -> None:
    text = [words] if argument.endswith(("-labels", "-header")) else words.split()
    assert message in refusal(argument, *text)
