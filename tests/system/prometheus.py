"""A real Prometheus: its linter, and a server that scrapes one page."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.system.stack import wait_until

from antiphon.supervisor.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

UNPACKED = Path(__file__).parents[2] / ".venv/prometheus/usr/bin"


def program(name: str) -> str:
    """Find a program of Debian's package `prometheus`: `make test-tools` brings it."""
    found = shutil.which(name) or shutil.which(name, path=str(UNPACKED))
    assert found is not None, f"{name} is missing: run make test-tools"
    return found


def lint(page: str) -> list[str]:
    """Return what promtool says of a page."""
    told = subprocess.run(
        [program("promtool"), "check", "metrics"],
        input=page,
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    return [line for line in (told.stdout + told.stderr).splitlines() if line]


@dataclass(frozen=True)
class Prometheus:
    """A server that scrapes one target each half second."""

    url: str

    def ask(self, expression: str) -> list[float]:
        """Evaluate an expression now; return the values of its series."""
        query = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"{self.url}/api/v1/query?{query}", timeout=10) as reply:
            result = json.load(reply)["data"]["result"]
        return [float(series["value"][1]) for series in result]


@contextmanager
def scraping(target: str, folder: Path) -> Iterator[Prometheus]:
    """Run a server until left. `target` is host and port."""
    config = folder / "prometheus.yaml"
    job = {"job_name": "antiphon", "static_configs": [{"targets": [target]}]}
    config.write_text(json.dumps({"global": {"scrape_interval": "500ms"}, "scrape_configs": [job]}))
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    command = [
        program("prometheus"),
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            server = Prometheus(f"http://{address}")
            wait_until(lambda: _up(server), 30, "prometheus scrapes")
            yield server
        finally:
            process.terminate()
            process.wait(20)


def _up(server: Prometheus) -> bool:
    try:
        return server.ask("up") == [1.0]
    except OSError:
        return False
