"""What SGLang's arguments do to the records of requests."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, TypeVar

import pytest
from tests.arguments import compare_async, refusal, settings_of
from tests.unit.gateway.cluster import house
from tests.unit.gateway.test_http import post

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from antiphon.config.settings import Settings

T = TypeVar("T")

REQUEST = {"text": "x" * 60, "rid": "mine", "sampling_params": {"top_k": 3}}


def served(read: Callable[[], T]) -> Callable[[Settings], Awaitable[T]]:
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
    events = served(lambda: [line.split()[1] for line in written(tmp_path).splitlines()])
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
            "--log-requests-level", level, observe=served(parts), base=base
        )
        assert (given, without) == (shown, (True, True))


@pytest.mark.argument("--log-requests-format")
async def test_log_requests_format_writes_json(tmp_path: Path) -> None:
    first = served(lambda: written(tmp_path).splitlines()[0])
    base = ("--log-requests", "--log-requests-target", str(tmp_path))
    given, without = await compare_async("--log-requests-format", "json", observe=first, base=base)
    assert json.loads(given)["rid"] == "mine"
    assert " request.received rid=mine " in without


@pytest.mark.argument("--log-requests-target")
async def test_log_requests_target_is_where_they_go(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    places = served(lambda: ("rid=mine" in capfd.readouterr().out, "rid=mine" in written(tmp_path)))
    arguments = ("--log-requests-target", "stdout", str(tmp_path))
    given, without = await compare_async(*arguments, observe=places, base=("--log-requests",))
    assert (given, without) == ((True, True), (True, False))


@pytest.mark.argument("--export-metrics-to-file")
async def test_export_metrics_to_file_writes_a_record_a_request(tmp_path: Path) -> None:
    records = served(lambda: len(written(tmp_path).splitlines()))
    base = ("--export-metrics-to-file-dir", str(tmp_path))
    given, without = await compare_async("--export-metrics-to-file", observe=records, base=base)
    assert (given, without) == (1, 0)


@pytest.mark.argument("--export-metrics-to-file-dir")
async def test_export_metrics_to_file_dir_is_where_they_go(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    records = served(lambda: (written(one).count("\n"), written(two).count("\n")))
    flag = "--export-metrics-to-file-dir"
    base = ("--export-metrics-to-file", flag, str(one))
    given, without = await compare_async(flag, str(two), observe=records, base=base)
    assert (given, without) == ((0, 1), (1, 0))


@pytest.mark.argument("--crash-dump-folder")
async def test_crash_dump_folder_gets_the_requests_of_a_crash(tmp_path: Path) -> None:
    dumped = served(lambda: [json.loads(line)["event"] for line in written(tmp_path).splitlines()])
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
