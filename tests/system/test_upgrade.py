"""Every service is replaced by that of another version while clients stream: nothing is lost.

The other version is the wheel of the last release by CHANGELOG.md, built from the commit that
released it. Its kernels are those of torch, as if there were no compiler: they take minutes to
build, and this is about what the services say to each other.
"""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import sysconfig
import time
import venv
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.faults.matrix import TOKENS
from tests.faults.streams import Answer, Load
from tests.support.nats import NatsServer
from tests.support.wait import until
from tests.system.stack import START_TIMEOUT_S, STOP_TIMEOUT_S, Stack, heartbeats

from antiphon.embedded import SERVED_NAME
from antiphon.supervisor.ports import free_port
from antiphon.wire.base import ProcessState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from antiphon.wire.heartbeat import Heartbeat

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.system, pytest.mark.long, pytest.mark.timeout(900)]
CLIENTS = 6
RELEASE = re.compile(r"^## \d+\.\d+\.\d+ - .*$", re.MULTILINE)
MODULES = {
    "worker-0": "antiphon.model_worker",
    "worker-1": "antiphon.model_worker",
    "scheduler-0": "antiphon.scheduler",
    "scheduler-1": "antiphon.scheduler",
    "tokenizer-0": "antiphon.tokenizer",
    "tokenizer-1": "antiphon.tokenizer",
    "detokenizer-0": "antiphon.detokenizer",
    "detokenizer-1": "antiphon.detokenizer",
    "gateway-0": "antiphon.gateway",
}
SMALL = ("--cache-tokens-max", "32768", "--batching-running-max", "8", "--model-threads", "1")
WHOLE_S = 120.0


def released() -> str:
    """The commit that wrote the newest release into the changelog; skips without the history."""
    heading = RELEASE.findall((ROOT / "CHANGELOG.md").read_text())[0]
    log = ("git", "-C", str(ROOT), "log", "--reverse", "--format=%H", f"-S{heading}", "--")
    found = subprocess.run([*log, "CHANGELOG.md"], capture_output=True, text=True, check=False)
    if not found.stdout:
        pytest.skip("the history of the last release is not here")
    return found.stdout.split()[0]


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the last release's wheel and what it depends on."""
    folder = tmp_path_factory.mktemp("release")
    sources = folder / "sources"
    sources.mkdir()
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", released()], stdout=subprocess.PIPE, check=True
    )
    subprocess.run(["tar", "-x", "-C", str(sources)], input=archive.stdout, check=True)
    pip = (sys.executable, "-m", "pip", "--quiet")
    build = ("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder))
    subprocess.run([*pip, *build, str(sources)], check=True, timeout=300)
    (wheel,) = folder.glob("antiphon-*.whl")
    venv.create(folder / "environment")
    python = folder / "environment" / "bin" / "python"
    (packages,) = (folder / "environment").glob("lib/*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    install = ("--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    subprocess.run([*pip, *install], check=True, timeout=300)
    return python


@dataclass
class Cluster:
    """Processes of each service, of one version or another."""

    nats_url: str
    folder: Path
    port: int
    lives: dict[str, subprocess.Popen[str]] = field(
        default_factory=dict[str, "subprocess.Popen[str]"]
    )

    @property
    def stack(self) -> Stack:
        url = f"http://127.0.0.1:{self.port}"
        process = next(iter(self.lives.values()))
        return Stack(process, url, SERVED_NAME, self.nats_url, self.folder, 0.0)

    def start(self, instance: str, python: Path, environment: Mapping[str, str]) -> None:
        command = [str(python), "-m", MODULES[instance], "--instance", instance]
        command += ["--bus-url", self.nats_url, "--gateway-port", str(self.port), *SMALL]
        with (self.folder / f"{instance}.log").open("ab") as lines:
            self.lives[instance] = subprocess.Popen(
                command, stdout=lines, stderr=lines, env=dict(environment), text=True
            )

    async def replace(self, instance: str, python: Path, environment: Mapping[str, str]) -> None:
        """Stop a process as an operator does, and start its successor."""
        beats = await heartbeats(self.nats_url, lambda beats: instance in beats)
        life = beats[instance].process
        self.lives[instance].send_signal(signal.SIGTERM)
        await asyncio.to_thread(self.lives[instance].wait, STOP_TIMEOUT_S)

        def is_back(beats: dict[str, Heartbeat]) -> bool:
            beat = beats.get(instance)
            if beat is None or beat.process == life:
                return False
            return beat.state is ProcessState.READY

        self.start(instance, python, environment)
        await heartbeats(self.nats_url, is_back, START_TIMEOUT_S)


@asynccontextmanager
async def cluster(
    folder: Path, python: Path, environment: Mapping[str, str]
) -> AsyncIterator[Cluster]:
    async with NatsServer(durable=True) as broker:
        running = Cluster(broker.url, folder, free_port("127.0.0.1"))
        try:
            for instance in MODULES:
                running.start(instance, python, environment)
            names = MODULES.keys()
            await heartbeats(broker.url, lambda beats: beats.keys() >= names, START_TIMEOUT_S)
            await until(running.stack.healthy, START_TIMEOUT_S)
            yield running
        finally:
            for process in running.lives.values():
                process.terminate()
            for process in running.lives.values():
                await asyncio.to_thread(process.wait, STOP_TIMEOUT_S)


def is_whole(answer: Answer) -> bool:
    """Whether all choices have ended, and say as much as is counted."""
    if answer.error is not None or answer.usage is None:
        return False
    _, tokens = answer.usage
    kinds = set(answer.finishes.values())
    return bool(answer.finishes) and (kinds != {"length"} or tokens >= TOKENS)


@pytest.mark.parametrize("forward", [True, False], ids=["upgrade", "downgrade"])
async def test_services_of_two_versions_serve_together(
    before: Path, tmp_path: Path, forward: bool
) -> None:
    old = before, {"PATH": str(before.parent), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    path = {"PYTHONPATH": ":".join(str(ROOT / part) for part in ("services", "shared", "kernels"))}
    new = Path(sys.executable), old[1] | path
    first, second = (old, new) if forward else (new, old)
    async with cluster(tmp_path, *first) as running:
        async with Load(running.stack, CLIENTS, TOKENS) as load:
            gateway_s = 0.0
            for instance in MODULES:
                gateway_s = time.monotonic()  # the last one
                await running.replace(instance, *second)
            replaced = [len(answers) for answers in load.answers]

            def asked_since() -> bool:
                later = (a[count:] for a, count in zip(load.answers, replaced, strict=True))
                return all(any(map(is_whole, answers)) for answers in later)

            await until(asked_since, WHOLE_S)
        answers = [answer for answers in load.answers for answer in answers]
    # The only gateway refuses new requests while it finishes those that it has.
    refused = [a for a in answers if a.error == "unavailable" and a.began_s > gateway_s]
    assert not any(answer.arrivals_s for answer in refused)
    taken = [answer for answer in answers if answer not in refused]
    assert len(taken) > 2 * CLIENTS
    assert [(a.number, a.error, a.usage) for a in taken if not is_whole(a)] == []
