"""The request log: what is written of a request by every API, and what never is."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, Counter
from tests.support.wait import until
from tests.unit.gateway.calls import (
    BODIES,
    CHAT,
    COMPLETE,
    GENERATE,
    HI,
    MESSAGES,
    RESPONSES,
    TEXT,
    Body,
    failure,
    get,
    ok,
    post,
    running_post,
    stream,
)
from tests.unit.gateway.cluster import CONTEXT_TOKENS, MODEL, SCRIPT, House, fails_to_start, house
from tests.unit.gateway.keyed import bearer
from tests.unit.gateway.test_generate import request, visiting
from tests.unit.gateway.test_pooling import EMBEDDER

from antiphon.config.errors import ConfigError
from antiphon.config.gateway import AccessConfig, RequestLogConfig
from antiphon.gateway.request_log import request_log, writer
from antiphon.gateway.request_log.record import TextTruncator
from antiphon.gateway.request_log.writer import RecordWriter
from antiphon.gateway.stream.stream import RequestStream
from antiphon.wire.errors import WorkerLost
from antiphon.wire.generate import GenerateEnd

if TYPE_CHECKING:
    from pathlib import Path

CONFIGURE = "/configure_logging"
ADMIN = "operator-key"
METADATA = {
    *("timestamp", "event", "rid", "id", "tenant", "api", "n", "priority"),
    "request_received_ts",
}
END = {
    *("outcome", "finish_reasons", "prompt_tokens", "completion_tokens", "cached_tokens"),
    *("reasoning_tokens", "request_finished_ts", "e2e_latency", "first_token_latency"),
    "decode_throughput",
}
ROUTES = {
    GENERATE: ("native", {}),
    CHAT: ("chat", {}),
    COMPLETE: ("completion", {"model": MODEL}),
    MESSAGES: ("messages", {"model": MODEL}),
    RESPONSES: ("responses", {"model": MODEL}),
    "/api/chat": ("ollama", {"model": MODEL}),
    "/api/generate": ("ollama", {"model": MODEL, "raw": True}),
}


def logged(folder: Path, **config: object) -> RequestLogConfig:
    """Settings of a log in a folder, as JSON."""
    given = {"enabled": True, "format": "json", "target": str(folder)} | config
    return RequestLogConfig(**given)  # pyright: ignore[reportArgumentType]


def recorded(folder: Path, **config: object) -> RequestLogConfig:
    """Settings of a log, of metrics and of crash dumps in one folder."""
    more = {"crash_dump_folder": str(folder), "export_metrics": True, "export_folder": str(folder)}
    return logged(folder, **more, **config)


def lines(folder: Path, pattern: str = "requests_gateway-0_*.log") -> list[Body]:
    """Every line of the files in a folder."""
    texts = [file.read_text() for file in sorted(folder.glob(pattern))]
    return [json.loads(line) for text in texts for line in text.splitlines()]


def dump(folder: Path) -> list[Body]:
    """The lines of the one crash dump below a folder."""
    (file,) = folder.rglob("crash_dump_*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def dropped(at: House, reason: str) -> float:
    name = "antiphon_dropped_request_records_total"
    return at.gateway.metrics.registry.get_sample_value(name, {"reason": reason}) or 0.0


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", ROUTES)
async def test_every_route_logs_a_request_once_at_its_arrival_and_once_at_its_end(
    path: str, streamed: bool, tmp_path: Path
) -> None:
    api, fields = ROUTES[path]
    async with house(request_log=logged(tmp_path)) as at:
        await ok(at, path, BODIES[path] | fields | {"stream": streamed})
    came, ended = lines(tmp_path)
    assert (came["event"], ended["event"]) == ("request.received", "request.finished")
    assert came["id"] == ended["id"]
    assert api in came["api"]
    assert (ended["output"], ended["outcome"]) == ([TEXT], "stop")
    assert (ended["completion_tokens"], ended["cached_tokens"]) == (4, 1)


async def test_nats_requests_are_logged(tmp_path: Path) -> None:
    async with house(request_log=logged(tmp_path)) as at, visiting(at) as visitor:
        await visitor.ask(request("mine", api_key="sk-x"))
        await visitor.first(GenerateEnd)
    came, ended = lines(tmp_path)
    assert (came["api"], came["rid"]) == ("generate", "mine")
    assert came["input"] == {"messages": HI}
    assert ended["output"] == [TEXT]
    assert "sk-x" not in json.dumps([came, ended])


async def test_embedding_is_logged_without_its_vector(tmp_path: Path) -> None:
    async with house(request_log=logged(tmp_path, level=3)) as at:
        at.cluster.pooling = EMBEDDER
        await ok(at, "/v1/embeddings", {"input": "one", "model": MODEL})
    _, ended = lines(tmp_path)
    assert (ended["input"], ended["output"]) == ({"text": "one"}, [""])


@pytest.mark.parametrize(
    ("level", "more"),
    [
        (0, set[str]()),
        (1, {"sampling_params"}),
        (2, {"sampling_params", "input", "output"}),
        (3, {"sampling_params", "input", "output"}),
    ],
)
async def test_level_decides_which_fields_a_line_has(
    level: int, more: set[str], tmp_path: Path
) -> None:
    async with house(request_log=logged(tmp_path, level=level)) as at:
        await ok(at, GENERATE, {"text": "hi", "sampling_params": {"temperature": 0.0}})
    came, ended = lines(tmp_path)
    assert came.keys() == METADATA | (more - {"output"})
    assert ended.keys() == METADATA | END | more
    if more:
        assert came["sampling_params"]["temperature"] == 0.0


@pytest.mark.parametrize(
    ("level", "text", "output"),
    [(2, "x" * 2048 + "...", "y" * 2048 + "..."), (3, "x" * 3000, "y" * 3000 + "!")],
)
async def test_level_2_cuts_texts_at_2048_characters(
    level: int, text: str, output: str, tmp_path: Path
) -> None:
    prompt = "x" * 3000
    async with house(request_log=logged(tmp_path, level=level)) as at:
        at.cluster.script = ("y" * 3000, "!")
        at.cluster.words[prompt] = 7  # one token, for the context
        await ok(at, GENERATE, {"text": prompt})
    _, ended = lines(tmp_path)
    assert (ended["input"]["text"], ended["output"]) == (text, [output])


async def test_text_format_writes_names_and_values_in_one_line(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async with house(request_log=RequestLogConfig(enabled=True)) as at:
        await ok(at, GENERATE, {"text": "a\nb", "rid": "mine"})
    came, ended = [line for line in capfd.readouterr().out.splitlines() if " request." in line]
    assert " request.received rid=mine " in came
    assert came.endswith(' input={"text":"a\\nb"}')
    assert " request.finished rid=mine " in ended
    assert ended.endswith(f' output=["{TEXT}"]')
    assert " completion_tokens=4 " in ended


@pytest.mark.parametrize("log_format", ["text", "json"])
async def test_prompt_adds_no_line_and_moves_no_cursor(log_format: str, tmp_path: Path) -> None:
    """Line ends of Unicode and control characters of terminals are written as escapes."""
    evil = "a\nrequest.finished rid=forged\r\x0b\x1b[2J\x7f\x85\x9b2J\u2028\u2029\u202eb"
    async with house(request_log=logged(tmp_path, format=log_format, level=3)) as at:
        await ok(at, GENERATE, {"text": evil, "rid": "mine"})
    (file,) = tmp_path.iterdir()
    text = file.read_text()
    assert len(text.splitlines()) == 2
    assert all(character.isprintable() or character == "\n" for character in text)
    if log_format == "json":
        assert lines(tmp_path)[0]["input"]["text"] == evil


async def test_errors_are_logged_by_their_code_alone_if_parameters_are_not(tmp_path: Path) -> None:
    """The text of an error may quote the request."""
    quoted = "regex: 'secret(' is not closed"
    export = {"export_metrics": True, "export_folder": str(tmp_path)}
    for level in (0, 1):
        config = logged(tmp_path / str(level), level=level, **export)
        async with house(request_log=config) as at:
            at.cluster.row_error = WorkerLost(quoted)
            await post(at, GENERATE, {"text": "hi"})
    _, ended = lines(tmp_path / "0")
    assert ended["outcome"] == "worker_lost"
    assert "error" not in ended
    assert lines(tmp_path / "1")[1]["error"] == quoted
    assert all("error" not in line for line in lines(tmp_path, "request_metrics_*.jsonl"))


async def test_errors_and_refusals_are_logged_with_their_code(tmp_path: Path) -> None:
    async with house(request_log=logged(tmp_path)) as at:
        too_long = {"input_ids": [7] * (CONTEXT_TOKENS + 1)}
        assert (await post(at, GENERATE, too_long)).status == 400
        at.cluster.row_error = WorkerLost("the worker died")
        assert (await post(at, GENERATE, {"text": "hi"})).status == 503
    ends = [line for line in lines(tmp_path) if line["event"] == "request.finished"]
    assert [line["outcome"] for line in ends] == ["prompt_too_long", "worker_lost"]
    assert ends[1]["error"] == "the worker died"


async def test_each_of_several_outputs_is_logged(tmp_path: Path) -> None:
    async with house(request_log=logged(tmp_path)) as at:
        await ok(at, GENERATE, {"text": "hi", "sampling_params": {"n": 2}})
    _, ended = lines(tmp_path)
    assert (ended["output"], ended["finish_reasons"]) == ([TEXT, TEXT], ["stop", "stop"])


async def test_keys_and_cache_salts_are_in_no_record(tmp_path: Path) -> None:
    config = recorded(tmp_path, level=3)
    async with house(access=AccessConfig(api_key="sk-secret"), request_log=config) as at:
        body: Body = {"text": "hi", "cache_salt": "salt-secret", "extra_key": "salt-secret"}
        for header in ({"Authorization": "Bearer sk-secret"}, {"X-Api-Key": "sk-secret"}):
            await ok(at, GENERATE, body, **header)
        at.service.submission.request_log.dump("a test")
    texts = {file.name: file.read_text() for file in tmp_path.rglob("*") if file.is_file()}
    assert len(texts) == 3
    with_prompts = [text for name, text in texts.items() if not name.startswith("request_metrics")]
    assert ["hi" in text for text in with_prompts] == [True, True]
    assert "secret" not in "".join(texts.values())


async def test_no_logs_leaves_a_request_out_of_log_and_dump(tmp_path: Path) -> None:
    async with house(request_log=recorded(tmp_path)) as at:
        await ok(at, GENERATE, {"text": "private", "rid": "one", "no_logs": True})
        await ok(at, GENERATE, {"text": "public", "rid": "two"})
        at.service.submission.request_log.dump("a test")
    assert {line["rid"] for line in lines(tmp_path)} == {"two"}
    assert {line["rid"] for line in dump(tmp_path)[1:]} == {"two"}
    counted = lines(tmp_path, "request_metrics_*.jsonl")
    assert [line["rid"] for line in counted] == ["one", "two"]


async def test_without_a_recorder_streams_are_plain_and_no_thread_runs(at: House) -> None:
    async with running_post(at, GENERATE, {"text": "hi"}):
        await until(lambda: bool(at.service.submission.driver.streams()))
        kinds = {type(each) for each in at.service.submission.driver.streams()}
    assert not [one for one in threading.enumerate() if one.name.startswith("request-log")]
    assert kinds == {RequestStream}


async def test_health_probes_are_not_recorded(tmp_path: Path) -> None:
    async with house(request_log=logged(tmp_path)) as at:
        assert (await get(at, "/health_generate")).status == 200
    assert lines(tmp_path) == []


def counter() -> Counter:
    return Counter("dropped", "Dropped.", ("reason",), registry=CollectorRegistry())


def count(made: Counter, reason: str) -> float:
    return made.labels(reason)._value.get()


async def test_full_queue_drops_records_and_counts_them() -> None:
    go, written, drops = threading.Event(), list[int](), counter()
    queue = RecordWriter(100, drops, lambda: 0.0)

    def first() -> None:
        go.wait(10)
        written.append(1)

    queue.put(60, first)
    queue.put(60, lambda: written.append(2))
    queue.put(40, lambda: written.append(3))
    go.set()
    await queue.close()
    assert written == [1, 3]
    assert count(drops, "queue_full") == 1


async def test_failing_disk_is_logged_once_a_minute_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now, drops = [0.0], counter()
    queue = RecordWriter(1000, drops, lambda: now[0])

    def fail_at(moment: float) -> None:
        now[0] = moment
        raise OSError(28, "No space left on device")

    for moment in (0.0, 1.0, 59.0, 61.0):
        queue.put(1, partial(fail_at, moment))
    await queue.close()
    records = [one for one in caplog.records if one.message == "request records not written"]
    assert [record.levelno for record in records] == [logging.ERROR, logging.ERROR]
    assert count(drops, "write_failed") == 4


async def test_target_that_fails_ends_no_request_and_the_other_target_is_written(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "log"
    async with house(request_log=logged(folder, target=f"{folder} stdout")) as at:
        folder.rmdir()
        folder.write_text("no folder any more")
        await ok(at, GENERATE, {"text": "hi"})
        await until(lambda: dropped(at, "write_failed") == 2)
    assert capfd.readouterr().out.count('"event":"request.') == 2


async def test_folder_that_cannot_be_made_keeps_the_gateway_from_starting(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    config = logged(taken / "log")
    await fails_to_start(ConfigError, "request_log: the folder", request_log=config)


async def test_file_that_was_removed_is_made_again(tmp_path: Path) -> None:
    async with house(request_log=logged(tmp_path)) as at:
        await ok(at, GENERATE, {"text": "hi", "rid": "one"})
        await until(lambda: len(lines(tmp_path)) == 2)
        (file,) = tmp_path.iterdir()
        assert file.stat().st_mode & 0o777 == 0o600
        file.unlink()
        await ok(at, GENERATE, {"text": "hi", "rid": "two"})
    assert [line["rid"] for line in lines(tmp_path)] == ["two", "two"]


def test_a_line_after_one_that_the_disk_cut_is_whole(tmp_path: Path) -> None:
    file = writer.HourlyFile(tmp_path, "log", ".txt")
    file.write(b"one\n", 0.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (7, hard))  # in place of a full disk
    try:
        for _ in range(2):
            with pytest.raises(OSError, match="too large"):
                file.write(b"number two\n", 0.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    file.write(b"three\n", 0.0)
    file.write(b"four\n", 0.0)
    file.close()
    (path,) = tmp_path.iterdir()
    assert path.read_text().splitlines() == ["one", "num", "three", "four"]


def test_a_cut_goes_no_further_into_a_value_than_it_shows() -> None:
    many: dict[str, object] = {str(index): "x" * 9 for index in range(100_000)}
    for value in (many, [many], {"inner": many}, list(many)):
        assert len(json.dumps(TextTruncator(100).value(value))) < 500


def test_each_hour_has_a_file(tmp_path: Path) -> None:
    file = writer.HourlyFile(tmp_path, "log", ".txt")
    for unix_s in (0.0, 3599.0, 3600.0):
        file.write(b"x\n", unix_s)
    file.close()
    found = {each.name: each.read_text() for each in tmp_path.iterdir()}
    assert found == {"log_19700101_00.txt": "x\nx\n", "log_19700101_01.txt": "x\n"}


async def test_configure_logging_changes_the_log_live(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    async with house(access=AccessConfig(api_key=ADMIN)) as at:

        async def generate(rid: str) -> None:
            await ok(at, GENERATE, {"text": "hi", "rid": rid}, **bearer(ADMIN))

        async def configure(**wanted: object) -> None:
            reply = await ok(at, CONFIGURE, wanted, **bearer(ADMIN))
            assert wanted.items() <= reply.items()

        await generate("before")
        await configure(
            log_requests=True,
            log_requests_level=0,
            log_requests_format="json",
            log_requests_target=[str(folder)],
        )
        await generate("logged")
        await configure(log_requests_level=2)
        await generate("more")
        await configure(log_requests=False)
        await generate("after")
    found = [(line["rid"], "output" in line) for line in lines(folder)]
    assert found == [("logged", False), ("logged", False), ("more", False), ("more", True)]


async def test_configure_logging_needs_an_operators_key() -> None:
    access = AccessConfig(api_key="sk-plain", admin_api_key=ADMIN)
    async with house(access=access) as at:
        for header, expected in (({}, 401), (bearer("sk-plain"), 403), (bearer(ADMIN), 200)):
            status, _, _ = await post(at, CONFIGURE, {"log_requests": False}, **header)
            assert status == expected, header


async def test_without_keys_no_other_folder_can_be_configured(tmp_path: Path) -> None:
    named, other = tmp_path / "named", tmp_path / "other"
    async with house(request_log=logged(named)) as at:
        status, error = await failure(at, CONFIGURE, {"log_requests_target": str(other)})
        assert (status, "log_requests_target" in str(error)) == (403, True)
        for target in ("stdout", str(named)):
            await ok(at, CONFIGURE, {"log_requests_target": target})
    assert not other.exists()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"dump_requests_folder": "/tmp/x"}, "pickle"),
        ({"dump_requests_threshold": 10}, "pickle"),
        ({"crash_dump_folder": "/tmp/x"}, "--crash-dump-folder"),
        ({"log_requests_level": 4}, "log_requests_level"),
        ({"log_requests_format": "xml"}, "log_requests_format"),
        ({"log_requests_target": []}, "log_requests_target"),
        ({"log_requests_target": " "}, "log_requests_target"),
        ({"log_requests": True, "log_requests_target": "/proc/nowhere"}, "log_requests_target"),
    ],
)
async def test_configure_logging_refuses_and_changes_nothing(body: Body, reason: str) -> None:
    async with house(access=AccessConfig(api_key=ADMIN)) as at:
        before = at.service.submission.request_log.logging
        status, reply, _ = await post(at, CONFIGURE, body, **bearer(ADMIN))
        assert (status, reason in str(reply)) == (400, True), reply
        assert at.service.submission.request_log.logging == before


async def test_export_writes_a_record_of_numbers_for_each_finished_request(tmp_path: Path) -> None:
    config = RequestLogConfig(export_metrics=True, export_folder=str(tmp_path))
    async with house(request_log=config) as at:
        await ok(at, GENERATE, {"text": "hi", "rid": "mine"})
        await stream(at, CHAT, {"messages": HI})
    first, second = lines(tmp_path, "request_metrics_gateway-0_*.jsonl")
    assert first.keys() == (METADATA - {"event"}) | END | {"model_name"}
    assert (first["rid"], first["model_name"], first["api"]) == ("mine", MODEL, "native")
    assert (first["prompt_tokens"], first["completion_tokens"], first["cached_tokens"]) == (2, 4, 1)
    assert 0 < first["first_token_latency"] <= first["e2e_latency"]
    assert first["request_received_ts"] <= first["request_finished_ts"]
    assert second["api"] == "chat"


async def crash(at: House) -> None:
    """End the gateway by a bug while a request runs, another one having finished."""

    async def fail() -> None:
        raise RuntimeError("a bug")

    async def ask() -> None:
        with suppress(aiohttp.ClientError, AssertionError):
            await ok(at, GENERATE, {"text": "hi", "rid": "open"})

    await ok(at, GENERATE, {"text": "done", "rid": "finished"})
    at.cluster.hold_at = 2
    async with asyncio.TaskGroup() as group:
        group.create_task(ask())
        driver = at.service.submission.driver
        await until(lambda: any(each.first_token_at for each in driver.streams()))
        at.service.submission.runtime.group.create_task(fail())
        await at.gateway.gone.wait()


async def test_crash_of_the_gateway_leaves_its_requests(tmp_path: Path) -> None:
    config = RequestLogConfig(crash_dump_folder=str(tmp_path))
    with pytest.raises(BaseExceptionGroup):
        async with house(request_log=config) as at:
            await crash(at)
    head, *records = dump(tmp_path)
    assert (head["event"], head["finished"], head["left_out"]) == ("crash_dump", 1, 0)
    by_rid = {record["rid"]: record for record in records}
    assert by_rid["finished"]["input"] == {"text": "done"}
    assert by_rid["finished"]["output"] == [TEXT]
    assert by_rid["open"]["event"] == "request.unfinished"
    assert by_rid["open"]["output"] == ["".join(SCRIPT[:2])]


async def test_gateway_that_stops_leaves_no_dump(tmp_path: Path) -> None:
    async with house(request_log=RequestLogConfig(crash_dump_folder=str(tmp_path))) as at:
        await ok(at, GENERATE, {"text": "hi"})
    assert list(tmp_path.rglob("*")) == []


async def test_crash_dump_is_written_once_and_bounded(tmp_path: Path) -> None:
    config = RequestLogConfig(crash_dump_folder=str(tmp_path), held_bytes_max=8000)
    async with house(request_log=config) as at:
        for number in range(12):
            await ok(at, GENERATE, {"text": "hi", "rid": str(number)})
        log = at.service.submission.request_log
        assert log._held_bytes <= 8000
        log.dump("first")
        log.dump("second")
    head, *records = dump(tmp_path)
    assert head["reason"] == "first"
    kept = [int(record["rid"]) for record in records]
    assert kept == sorted(range(12 - len(kept), 12), reverse=True), "the latest first"
    assert 0 < len(kept) < 12
    (file,) = tmp_path.rglob("*.jsonl")
    assert file.stat().st_size <= 8000 + 500
    assert file.stat().st_mode & 0o777 == 0o600


async def test_finished_requests_are_held_for_300_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with house(request_log=RequestLogConfig(crash_dump_folder=str(tmp_path))) as at:
        await ok(at, GENERATE, {"text": "hi"})
        log = at.service.submission.request_log
        monkeypatch.setattr(request_log, "FINISHED_S", 0.0)
        log.dump("a test")
        assert log._held_bytes == 0
    assert [line["event"] for line in dump(tmp_path)] == ["crash_dump"]


async def test_texts_that_do_not_fit_are_cut_and_marked(tmp_path: Path) -> None:
    config = RequestLogConfig(crash_dump_folder=str(tmp_path), held_bytes_max=20_000)
    async with house(request_log=config) as at:
        at.cluster.script = ("y" * 15_000, "z" * 15_000, "!")
        await ok(at, GENERATE, {"text": "hi"})
        at.service.submission.request_log.dump("a test")
    head, *records = dump(tmp_path)
    assert head["left_out"] + len(records) == 1
    if records:
        assert (records[0]["cut"], records[0]["output"]) == (True, ["y" * 15_000])


def test_a_dump_that_cannot_be_written_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    made = writer.CrashDump(taken, "gateway-0", bytes_max=1000, unix_ms=lambda: 0)
    made.write("a test", [])
    assert [one.message for one in caplog.records] == ["crash dump not written"]
