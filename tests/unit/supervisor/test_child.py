"""What dies is started again, whatever the machine says to that, and its log stays small."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import sys
from pathlib import Path

import pytest
from tests.support.wait import until

from antiphon.config.load import child_environment
from antiphon.config.settings import HealthConfig, Settings
from antiphon.service import main
from antiphon.supervisor import child as module
from antiphon.supervisor.child import Child, Restarts
from antiphon.supervisor.liveness import HangDetector
from antiphon.supervisor.ports import PortRange, free_port, is_free
from antiphon.telemetry.log import CANNOT_START, JsonFormatter, TextFormatter
from antiphon.wire.base import Role
from antiphon.wire.ids import InstanceId


class Program(Child):
    """A child that runs a line of Python in place of a service."""

    line = ""

    def command(self, config: Path) -> tuple[str, ...]:
        return (sys.executable, "-S", "-c", self.line, str(config))


def program(folder: Path, line: str) -> Program:
    found = Program(
        role=Role.TOKENIZER,
        instance=InstanceId("tokenizer-0"),
        settings=Settings(),
        config=folder / "settings.yaml",
        log_folder=folder / "logs",
        environment=child_environment(Settings()),
        ports=PortRange("127.0.0.1", 0),
    )
    found.line = line
    return found


async def ran(service: Program) -> None:
    await service.start()
    await service.died()


def test_first_restart_is_at_once_and_later_ones_wait_ever_longer():
    restarts = Restarts()
    pauses = [restarts.pause_s(now) for now in (0.0, 1.0, 2.0, 3.0, 100.0)]
    assert pauses == [0.0, 0.5, 1.0, 2.0, 0.0]


async def test_service_that_cannot_start_is_tried_again(tmp_path: Path):
    service = program(tmp_path, "raise SystemExit('no model')")
    await service.start()
    async with asyncio.TaskGroup() as group:
        keep = group.create_task(service.keep_running())
        await until(lambda: service.log_tail().count("no model") == 3)
        keep.cancel()
    await service.stop(1.0)
    assert not service.alive


@pytest.mark.parametrize(
    ("status", "announced"),
    [(-9, True), (main.FAILED, True), (main.CANNOT_START, False), (main.REPLACED, False)],
)
async def test_death_is_announced_unless_another_process_may_have_the_name(
    tmp_path: Path, status: int, announced: bool, caplog: pytest.LogCaptureFixture
):
    """The last heartbeat under the name is that of the other process."""
    line = (
        f"import os; os.kill(os.getpid(), {-status})"
        if status < 0
        else f"raise SystemExit({status})"
    )
    service = program(tmp_path, line)
    exits: list[int] = []
    await service.start()
    async with asyncio.TaskGroup() as group:
        keep = group.create_task(service.keep_running(lambda: exits.append(status)))
        await until(lambda: "service died" in caplog.text)
        keep.cancel()
    await service.stop(1.0)
    assert bool(exits) is announced


async def test_service_start_that_the_machine_refuses_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    service = program(tmp_path, "import time; time.sleep(60)")
    await service.start()
    async with asyncio.TaskGroup() as group:
        keep = group.create_task(service.keep_running())
        with monkeypatch.context() as refusing:
            refusing.setattr("asyncio.create_subprocess_exec", no_process)
            service.kill()
            await until(lambda: "service did not start" in caplog.text)
        await until(lambda: service.alive)
        keep.cancel()
    await service.stop(1.0)


async def no_process(*_: object, **__: object) -> None:
    raise OSError(errno.EAGAIN, "no more processes")


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "no space left on device")


@pytest.mark.parametrize("cleaned", [False, True])
async def test_service_is_started_again_while_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cleaned: bool, capfd: pytest.CaptureFixture
):
    """Its settings are those of before, or come in memory, and its lines go to our own output."""
    shows = "import sys; print(len(open(sys.argv[1]).read()), flush=True)"
    service = program(tmp_path, shows)
    await ran(service)
    size = service.log_tail()
    assert int(size) > 1000
    monkeypatch.setattr(module, "write_yaml", full)
    service.log_path.unlink()
    service.log_path.mkdir()  # a log that cannot be opened
    if cleaned:
        service.config.unlink()
    await ran(service)
    assert service.process is not None
    assert service.process.returncode == 0
    assert size in capfd.readouterr().err


async def test_service_files_are_readable_by_their_owner_only(tmp_path: Path):
    service = program(tmp_path, "print('much text')")
    service.log_folder.mkdir(mode=0o700)
    service.log_path.touch(mode=0o644)  # of an earlier version
    await ran(service)
    service.log_path.write_text("x" * (module.LOG_BYTES_MAX + 1))
    service.trim_log()
    modes = {
        path.name: oct(path.stat().st_mode & 0o777)
        for path in (service.config, *service.log_folder.iterdir())
    }
    assert modes == {
        "settings.yaml": "0o600",
        "tokenizer-0.log": "0o600",
        "tokenizer-0.1.log": "0o600",
    }
    other = program(tmp_path / "new", "")
    await ran(other)
    for folder in (other.log_folder, other.config.parent):
        assert folder.stat().st_mode & 0o777 == 0o700


def refused(formatter: logging.Formatter, *reasons: str) -> str:
    """The log of a service that is refused at its start."""
    fields = [{"msg": CANNOT_START, "levelname": "ERROR", "reason": reason} for reason in reasons]
    fields = [{"msg": "noise " * 20_000}, *fields, {"msg": "stopped", "code": 3}]
    return "\n".join(formatter.format(logging.makeLogRecord(each)) for each in fields)


@pytest.mark.parametrize("formatter", [TextFormatter("tokenizer-0"), JsonFormatter("tokenizer-0")])
async def test_reasons_of_a_refused_start_are_read_from_its_log(
    tmp_path: Path, formatter: logging.Formatter
):
    reason = 'config.json: "pad_token_id" 9 is beyond the vocabulary of 8'
    written = tmp_path / "written"
    written.write_text(refused(formatter, reason, reason, "no_room"))
    service = program(tmp_path, f"print(open({str(written)!r}).read())")
    await ran(service)
    assert service.refusals() == f"{reason}; no_room"
    service.line = "raise SystemExit('killed')"  # a life that does not say why it ended
    await ran(service)
    assert service.refusals() == ""
    assert service.log_tail().endswith("killed")


TAKES_ITS_PORT = """
import os, socket, time
port = int(os.environ["ANTIPHON_HEALTH__PORT"])
try:
    server = socket.create_server(("127.0.0.1", port))
except OSError as error:
    reason = f"port 127.0.0.1:{port}: {os.strerror(error.errno)}"
    raise SystemExit(f': cannot start reason="{reason}"')
print("listens at", port, flush=True)
time.sleep(60)
"""


async def test_port_taken_by_another_process_since_its_choice_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first = free_port("127.0.0.1")
    service = program(tmp_path, TAKES_ITS_PORT)
    service.ports = PortRange("127.0.0.1", first)
    with socket.create_server(("127.0.0.1", first)), monkeypatch.context() as choosing:
        choosing.setattr("antiphon.supervisor.ports.is_free", lambda *_: True)
        await service.start()
        choosing.undo()
        async with asyncio.TaskGroup() as group:
            failing = group.create_task(service.fails_to_start())
            await until(lambda: "listens at" in service.log_tail())
            assert f":{first}: Address already in use" in service.log_tail()
            assert not failing.done(), "it starts"
            service.kill()
    assert f"listens at {first}" not in service.log_tail()


def test_service_without_a_log_gives_no_reason(tmp_path: Path):
    assert program(tmp_path, "").refusals() == ""


ANSWERS = """
import http.server, sys
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
server = http.server.HTTPServer(("127.0.0.1", int({port})), Health)
print("listens", flush=True)
server.serve_forever()
"""


async def test_frozen_service_is_killed_and_started_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """One that answers is left alone, and so is one that has just started."""
    port = free_port("127.0.0.1")
    service = program(tmp_path, ANSWERS.format(port=port))
    await service.start()
    watch = HangDetector([service], lambda _: port, HealthConfig(), timeout_s=0.4, probe_s=0.1)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(service.keep_running()), group.create_task(watch.run())]
        await until(lambda: "listens" in service.log_tail())
        for _ in range(5):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.0\r\n\r\n")
            assert await reader.read(4) == b"HTTP"
            writer.close()
        first = service.process
        assert first is not None
        assert first.returncode is None
        first.send_signal(signal.SIGSTOP)
        await until(lambda: service.log_tail().count("listens") == 2)
        assert first.returncode == -signal.SIGKILL
        for task in tasks:
            task.cancel()
    await service.stop(1.0)
    messages = [record.message for record in caplog.records]
    assert messages == ["service does not answer", "service hangs and is killed", "service died"]


async def test_long_log_begins_anew_under_the_running_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "LOG_BYTES_MAX", 8)
    go = tmp_path / "go"
    waits = f"while not os.path.exists({str(go)!r}): time.sleep(0.01)"
    lines = ("import os, time", "print('much text', flush=True)", waits, "print('more')")
    service = program(tmp_path, "\n".join(lines))
    await service.start()
    await until(lambda: service.log_path.read_text() == "much text\n")
    service.trim_log()
    go.touch()
    await service.died()
    assert service.log_tail() == "more"
    service.trim_log()
    assert service.log_tail() == "more"
    assert [path.read_text() for path in tmp_path.glob("logs/*.1.log")] == ["much text\n"]


def test_named_port_is_free_and_not_one_that_connections_are_given():
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    for _ in range(50):
        port = free_port("127.0.0.1")
        assert is_free("127.0.0.1", port)
        assert not low <= port <= high


def test_names_get_the_next_free_port_and_keep_theirs() -> None:
    first = free_port("127.0.0.1")
    with socket.create_server(("127.0.0.1", first)):
        ports = PortRange("127.0.0.1", first)
        a, b = ports.allocate("a"), ports.allocate("b")
        assert first < a < b, "one is bound, and the other was given away but not bound yet"
        assert (ports.allocate("a"), ports.allocate("b")) == (a, b)
        with socket.create_server(("127.0.0.1", a)):
            assert ports.allocate("a") not in (first, a, b)
    assert PortRange("127.0.0.1", 0).allocate("a") == 0
