"""A whole stack as an operator starts it: `antiphon serve`, real processes, a real nats-server."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 60.0
POLL_S = 0.05
READY = re.compile(r"API (https?://\S+)/v1 · model (\S+) · NATS (\S+) · logs (\S+)")
SERVICES = (
    "gateway-0",
    "tokenizer-0",
    "scheduler-0",
    "worker-0",
    "detokenizer-0",
    "encoder-0",
    "kv_storage-0",
)


@dataclass(frozen=True)
class Stack:
    """A running stack."""

    process: subprocess.Popen[str]
    url: str
    model: str
    nats_url: str
    logs: Path
    started_in_s: float

    def pid(self, instance: str) -> int | None:
        """Return the pid of a service's current life, if it lives."""
        for pid, command in processes():
            if f"--instance {instance} " in command and str(self.process.pid) in command:
                return pid
        return None

    def pids(self) -> dict[str, int]:
        """Return every living service's pid."""
        found = {name: self.pid(name) for name in SERVICES}
        return {name: pid for name, pid in found.items() if pid is not None}

    def healthy(self) -> bool:
        """Whether the gateway says that it can serve."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def log(self, instance: str) -> str:
        """Return what a service has logged."""
        path = self.logs / f"{instance}.log"
        return path.read_text(errors="replace") if path.exists() else ""


def processes() -> Iterator[tuple[int, str]]:
    """Yield every living process with its command line."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            except (OSError, UnicodeDecodeError):
                continue
            if state != "Z":
                yield int(folder.name), command


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> float:
    """Poll until something outside this process is true; return how long it took."""
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        assert waited < timeout_s, f"{what}: not within {timeout_s} s"
        time.sleep(POLL_S)
    return time.monotonic() - began


@contextmanager
def serving(
    *arguments: str, python: str = sys.executable, environment: dict[str, str] | None = None
) -> Iterator[Stack]:
    """Run `antiphon serve` on any free port until left, then stop it as Ctrl-C does."""
    began = time.monotonic()
    process = subprocess.Popen(
        [
            python,
            "-u",
            "-m",
            "antiphon.cli.main",
            "serve",
            "--gateway-port",
            "0",
            *arguments,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=environment,
    )
    try:
        match = _ready_line(process)
        yield Stack(
            process=process,
            url=match[1],
            model=match[2],
            nats_url=match[3],
            logs=Path(match[4]),
            started_in_s=time.monotonic() - began,
        )
    finally:
        stop(process)


def stop(process: subprocess.Popen[str]) -> int:
    """Stop a stack as Ctrl-C does; return its exit status."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        return process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise
    finally:
        if process.stdout is not None:
            process.stdout.close()


def _ready_line(process: subprocess.Popen[str]) -> re.Match[str]:
    assert process.stdout is not None
    said: list[str] = []
    for line in process.stdout:
        said.append(line)
        match = READY.search(line)
        if match:
            return match
    raise AssertionError("the stack did not start:\n" + "".join(said))
