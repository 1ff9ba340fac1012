"""What SGLang's arguments do to metrics, to the log lines of steps and to records of requests."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from typing import TYPE_CHECKING, TypeVar

import pytest
from tests.arguments import compare, compare_async, refusal, settings_of, shows
from tests.unit.gateway.calls import post
from tests.unit.gateway.cluster import house
from tests.unit.gateway.metrics_page import Door, Page, labels_of, value, worker

from antiphon.model_worker.batching.loop import StepReport
from antiphon.model_worker.batching.page_budget import Capacity
from antiphon.model_worker.batching.state import CoreTotals
from antiphon.model_worker.observability.metrics import WorkerSize
from antiphon.model_worker.observability.step_accounting import StepAccounting
from antiphon.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

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
def test_decode_log_interval_is_the_decodes_between_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    def lines(settings: Settings) -> int:
        caplog.clear()
        interval = settings.batching.decode_log_interval
        capacity = WorkerSize(pages_total=10, page_tokens=16)
        accounts = StepAccounting(Metrics(), capacity, None, interval)
        for step in range(1, 81):
            accounts.record(decode(step), float(step))
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
        capacity=Capacity(
            pages_free=4, pages_evictable=1, pages_reserved=0, pages_returning=0, slots_free=0
        ),
        totals=CoreTotals(running=1, waiting=0),
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


T = TypeVar("T")

REQUEST = {"text": "x" * 60, "rid": "mine", "sampling_params": {"top_k": 3}}


def logged(read: Callable[[], T]) -> Callable[[Settings], Awaitable[T]]:
    """What `read` finds once a request was served and dumped as a crash would dump it."""

    async def observe(settings: Settings) -> T:
        async with house(request_log=settings.request_log) as at:
            status, _, _ = await post(at, "/generate", REQUEST)
            assert status == 200
            at.service.submission.request_log.dump("a test")
        return read()

    return observe


def written(folder: Path) -> str:
    """All that stands in the files below a folder, which are removed."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    text = "".join(file.read_text() for file in files)
    for file in files:
        file.unlink()
    return text


@pytest.mark.argument("--log-requests")
async def test_log_requests_logs_them(tmp_path: Path) -> None:
    events = logged(lambda: [line.split()[1] for line in written(tmp_path).splitlines()])
    base = ("--log-requests-target", str(tmp_path))
    given, without = await compare_async("--log-requests", observe=events, base=base)
    assert (given, without) == (["request.received", "request.finished"], [])


@pytest.mark.argument("--log-requests-level")
async def test_log_requests_level_decides_how_much(tmp_path: Path) -> None:
    def parts() -> tuple[bool, bool]:
        found = written(tmp_path)
        return "top_k" in found, "xxx" in found

    base = ("--log-requests", "--log-requests-target", str(tmp_path))
    for level, shown in (("0", (False, False)), ("1", (True, False))):
        given, without = await compare_async(
            "--log-requests-level", level, observe=logged(parts), base=base
        )
        assert (given, without) == (shown, (True, True))


@pytest.mark.argument("--log-requests-format")
async def test_log_requests_format_writes_json(tmp_path: Path) -> None:
    first = logged(lambda: written(tmp_path).splitlines()[0])
    base = ("--log-requests", "--log-requests-target", str(tmp_path))
    given, without = await compare_async("--log-requests-format", "json", observe=first, base=base)
    assert json.loads(given)["rid"] == "mine"
    assert " request.received rid=mine " in without


@pytest.mark.argument("--log-requests-target")
async def test_log_requests_target_places(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    places = logged(lambda: ("rid=mine" in capfd.readouterr().out, "rid=mine" in written(tmp_path)))
    arguments = ("--log-requests-target", "stdout", str(tmp_path))
    given, without = await compare_async(*arguments, observe=places, base=("--log-requests",))
    assert (given, without) == ((True, True), (True, False))


@pytest.mark.argument("--export-metrics-to-file")
async def test_export_metrics_to_file_writes_a_record_a_request(tmp_path: Path) -> None:
    records = logged(lambda: len(written(tmp_path).splitlines()))
    base = ("--export-metrics-to-file-dir", str(tmp_path))
    given, without = await compare_async("--export-metrics-to-file", observe=records, base=base)
    assert (given, without) == (1, 0)


@pytest.mark.argument("--export-metrics-to-file-dir")
async def test_export_metrics_to_file_dir_is_where_they_go(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    records = logged(lambda: (written(one).count("\n"), written(two).count("\n")))
    flag = "--export-metrics-to-file-dir"
    base = ("--export-metrics-to-file", flag, str(one))
    given, without = await compare_async(flag, str(two), observe=records, base=base)
    assert (given, without) == ((0, 1), (1, 0))


@pytest.mark.argument("--crash-dump-folder")
async def test_crash_dump_folder_gets_the_requests_of_a_crash(tmp_path: Path) -> None:
    dumped = logged(lambda: [json.loads(line)["event"] for line in written(tmp_path).splitlines()])
    arguments = ("--crash-dump-folder", str(tmp_path))
    given, without = await compare_async(*arguments, observe=dumped)
    assert (given, without) == (["crash_dump", "request.finished"], [])


def test_crash_dump_folder_is_not_the_folder_of_plans() -> None:
    given = settings_of("--crash-dump-folder", "/x", "--batching-dump-folder", "/y")
    assert (given.request_log.crash_dump_folder, given.batching.dump_folder) == ("/x", "/y")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--export-metrics-to-file",), "--export-metrics-to-file-dir"),
        (("--log-requests-level", "4"), "--log-requests-level"),
        (("--log-requests-format", "xml"), "--log-requests-format"),
        (("--log-requests-target", ","), "target is empty"),
    ],
)
def test_argument_with_a_bad_value_names_what_is_allowed(
    arguments: tuple[str, ...], message: str
) -> None:
    assert message in refusal(*arguments)


QUIT = """
import os, signal, sys
from pathlib import Path
from antiphon.gateway.request_log.writer import CrashDump, dump_on_quit
dump = CrashDump(Path(sys.argv[1]), "gateway-0", bytes_max=1000, unix_ms=lambda: 0)
with dump_on_quit(lambda reason: dump.write(reason, [])):
    os.kill(os.getpid(), signal.SIGQUIT)
    print("not reached")
"""


def test_sigquit_leaves_a_dump_and_ends_the_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", QUIT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stdout) == (-3, ""), done.stderr
    (line,) = written(tmp_path).splitlines()
    assert json.loads(line)["reason"] == "SIGQUIT"
