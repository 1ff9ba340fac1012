"""Five services start where only the core dependencies are: no torch, no numpy."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement
from tests.support.nats import NatsServer
from tests.system.stack import heartbeats

from antiphon.wire.base import ProcessState, Role

if TYPE_CHECKING:
    from collections.abc import Iterator

    from antiphon.wire.heartbeat import Heartbeat

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [str(ROOT / name) for name in ("services", "shared", "kernels")]
FIVE = (Role.GATEWAY, Role.TOKENIZER, Role.SCHEDULER, Role.DETOKENIZER, Role.KV_STORAGE)
HEAVY = ("torch", "numpy", "transformers", "PIL")


def core_distributions() -> dict[str, Distribution]:
    """Return ourselves, the core dependencies, and what they need."""
    found = {"antiphon": distribution("antiphon")}
    wanted = [Requirement(text) for text in found["antiphon"].requires or ()]
    while wanted:
        requirement = wanted.pop()
        extras = requirement.extras or {""}
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": e}) for e in extras):
            continue
        name = requirement.name.lower().replace("_", "-")
        if name not in found:
            found[name] = distribution(name)
            wanted += [Requirement(text) for text in found[name].requires or ()]
    return found


def top_level(dist: Distribution) -> Iterator[Path]:
    """Yield what a distribution put directly into site-packages."""
    for name in {file.parts[0] for file in dist.files or () if file.parts[0] != ".."}:
        yield Path(str(dist.locate_file(name)))


@pytest.fixture(scope="module")
def core() -> Iterator[list[str]]:
    """A search path that holds the core dependencies only."""
    with tempfile.TemporaryDirectory() as folder:
        for dist in core_distributions().values():
            for path in top_level(dist):
                link = Path(folder) / path.name
                if not link.exists():
                    link.symlink_to(path)
        yield [*SOURCES, folder]


def python(path: list[str], *arguments: str) -> list[str]:
    """Run this Python without its site-packages."""
    code = f"import sys; sys.path[:0] = {path!r}; "
    return [sys.executable, "-S", "-I", "-c", code + arguments[0], *arguments[1:]]


@pytest.mark.parametrize("module", HEAVY)
def test_heavy_packages_are_not_there(core: list[str], module: str):
    result = subprocess.run(
        python(core, f"import {module}"), capture_output=True, text=True, check=False
    )
    assert "ModuleNotFoundError" in result.stderr


async def test_five_services_become_ready(core: list[str], tmp_path: Path):
    ready: set[str] = set()

    def enough(beats: dict[str, Heartbeat]) -> bool:
        ready.update(beat.role for beat in beats.values() if beat.state is ProcessState.READY)
        return ready == set(FIVE)

    async with NatsServer() as nats:
        running = [start(core, role, nats.url, tmp_path) for role in FIVE]
        with suppress(TimeoutError):
            await heartbeats(nats.url, enough, timeout_s=60)
        for process in running:
            process.terminate()
        codes = [process.wait(30) for process in running]
    logs = "".join(file.read_text() for file in tmp_path.glob("*.log"))
    assert ready == set(FIVE), logs
    assert codes == [0] * len(FIVE), logs


def start(core: list[str], role: Role, url: str, folder: Path) -> subprocess.Popen[bytes]:
    run = (
        "import runpy; sys.argv[0] = 'antiphon'; "
        f"runpy.run_module('antiphon.{role}', run_name='__main__')"
    )
    flags = ("--bus-url", url, "--instance", f"{role}-0", "--gateway-port", "0")
    with (folder / f"{role}.log").open("wb") as output:
        return subprocess.Popen(python(core, run, *flags), stdout=output, stderr=output)
