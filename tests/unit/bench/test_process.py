"""A server is ended with all that it started, also when the benchmark is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.bench.models import LLAMA_135M, Model
from tests.bench.peers.peer import NotHere, Peer, running
from tests.system.stack import processes, wait_until

MODEL = Model(LLAMA_135M, Path("nowhere"))
SERVER = """
import http.server, subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", sys.argv[2]])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_): ...
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
BENCHMARK = """
import sys, time
from pathlib import Path
from tests.unit.bench.test_process import MODEL, Small
from tests.bench.peers.peer import running
with running(Small(Path(sys.argv[1]), 1), MODEL):
    print("up", flush=True)
    time.sleep(60)
"""


class Small(Peer):
    """A server with a child, both with the folder of the test in their command lines."""

    name = "small"
    arithmetic = ""
    script = SERVER

    @property
    def version(self) -> str:
        return "1"

    def install(self) -> None: ...

    def command(self, model: Model, port: int) -> list[str]:
        return [sys.executable, "-c", self.script, str(port), f"mark:{self.folder}"]


class Broken(Small):
    name = "broken"
    script = "import sys; sys.exit('no such thing')"


def alive(cache: Path) -> int:
    return sum(f"mark:{cache / 'peers' / 'small'}" in command for _, command in processes())


def test_a_server_is_stopped_with_its_children(tmp_path: Path) -> None:
    with running(Small(tmp_path, 1), MODEL) as server:
        assert alive(tmp_path) == 2
        assert server.model == MODEL.name
    wait_until(lambda: alive(tmp_path) == 0, 10, "the end of the server")


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    began_s = time.monotonic()
    with pytest.raises(NotHere, match="no such thing"), running(Broken(tmp_path, 1), MODEL):
        pass
    assert time.monotonic() - began_s < 10


@pytest.mark.parametrize("signal_", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_a_killed_benchmark(tmp_path: Path, signal_: signal.Signals) -> None:
    benchmark = subprocess.Popen(
        [sys.executable, "-c", BENCHMARK, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    with benchmark:
        assert benchmark.stdout is not None
        assert benchmark.stdout.readline() == "up\n"
        assert alive(tmp_path) == 2
        benchmark.send_signal(signal_)
    wait_until(lambda: alive(tmp_path) == 0, 10, "the end of the server")
