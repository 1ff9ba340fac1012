"""The stack of compose.yaml as processes: the same commands and environments, no containers."""

from __future__ import annotations

import asyncio
import re
import sys
import urllib.error
import urllib.request
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from antiphon.bus.permissions import STORE_PATH
from antiphon.bus.server import find, log_path, wait_ready
from antiphon.config.load import child_environment
from antiphon.config.settings import Settings
from antiphon.supervisor.ports import free_port

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import AsyncIterator, Mapping

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "compose"
NATS_CONF = "/etc/antiphon/nats.conf"
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 40.0
POLL_S = 0.1

VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")


def read_compose(name: str, environment: Mapping[str, str]) -> dict:
    """Read a compose file as compose does: anchors, then variables.

    Raises:
        KeyError: A variable that is asked for has no value.
    """

    def value(match: re.Match[str]) -> str:
        variable, kind, text = match.groups()
        if environment.get(variable) or kind != "-":
            return environment[variable]
        return text

    def fill(tree: object) -> object:
        if isinstance(tree, dict):
            return {key: fill(branch) for key, branch in tree.items()}
        if isinstance(tree, list):
            return [fill(branch) for branch in tree]
        return VARIABLE.sub(value, tree) if isinstance(tree, str) else tree

    filled = fill(yaml.safe_load((COMPOSE / name).read_text()))
    assert isinstance(filled, dict)
    return filled


def free_ports(count: int) -> list[int]:
    """Name ports that nobody has now, each once."""
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port("127.0.0.1"))
    return list(ports)


@dataclass
class Composed:
    services: Mapping[str, dict]
    folder: Path
    nats_url: str = ""
    ports: dict[str, int] = field(default_factory=dict)
    gateway_port: int = 0
    processes: dict[str, Process] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.gateway_port}"

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    async def start(self, name: str) -> None:
        """Start a service with its own command, from the image's entry point, and environment."""
        service = self.services[name]
        module = f"antiphon.{service['build']['args']['SERVICE']}"
        own = {key: self._here(text, name) for key, text in service["environment"].items()}
        if name == "gateway":
            own["ANTIPHON_GATEWAY__PORT"] = str(self.gateway_port)
        with (self.folder / f"{name}.log").open("wb") as output:
            self.processes[name] = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", module, *service.get("command", [])),
                env=child_environment(Settings()) | own,
                stdout=output,
                stderr=output,
            )

    async def wait_ready(self) -> None:
        """Return when every service says so on its health port."""
        async with asyncio.timeout(START_TIMEOUT_S):
            for name, process in self.processes.items():
                while not await asyncio.to_thread(self._is_ready, name):
                    assert process.returncode is None, f"{name} ended:\n{self.log(name)}"
                    await asyncio.sleep(POLL_S)

    async def probe(self, name: str) -> int:
        """Run a service's own health check; return its status."""
        form, program, *arguments = self.services[name]["healthcheck"]["test"]
        assert (form, program) == ("CMD", "python")
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *(self._here(argument, name) for argument in arguments),
            stderr=asyncio.subprocess.DEVNULL,
        )
        return await process.wait()

    async def stop(self, name: str) -> int:
        """Stop a service as compose does, and return its exit status."""
        process = self.processes[name]
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(STOP_TIMEOUT_S):
            return await process.wait()

    def metrics(self, name: str) -> str:
        url = f"http://127.0.0.1:{self.ports[name]}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.read().decode()

    def _is_ready(self, name: str) -> bool:
        try:
            url = f"http://127.0.0.1:{self.ports[name]}/readyz"
            with urllib.request.urlopen(url, timeout=5) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def _here(self, text: str, name: str) -> str:
        """Say an address or a folder of a container as it is on this machine."""
        ours = {
            "nats://nats:4222": self.nats_url,
            "0.0.0.0": "127.0.0.1",
            "8081": str(self.ports[name]),
            "/pages": str(self.folder / "pages"),
        }
        return re.sub("|".join(map(re.escape, ours)), lambda match: ours[match[0]], text)


@asynccontextmanager
async def composed(environment: Mapping[str, str], folder: Path) -> AsyncIterator[Composed]:
    services = read_compose("compose.yaml", environment)["services"]
    nats = services.pop("nats")
    async with broker(nats, folder) as url:
        *health, gateway_port = free_ports(len(services) + 1)
        stack = Composed(
            services=services,
            folder=folder,
            nats_url=url,
            ports=dict(zip(services, health, strict=True)),
            gateway_port=gateway_port,
        )
        try:
            for name in services:
                await stack.start(name)
            await stack.wait_ready()
            yield stack
        finally:
            for process in stack.processes.values():
                if process.returncode is None:
                    process.kill()
                    await process.wait()


@asynccontextmanager
async def broker(service: Mapping, folder: Path) -> AsyncIterator[str]:
    """Run nats-server with its command, environment and config of compose, on any free ports."""
    text = (COMPOSE / "nats.conf").read_text()
    for port in ("4222", "8222"):
        assert text.count(f'"0.0.0.0:{port}"') == 1
        text = text.replace(f'"0.0.0.0:{port}"', '"127.0.0.1:-1"')
    assert text.count(f'"{STORE_PATH}"') == 1
    text = text.replace(STORE_PATH, str(folder / "jetstream"))
    config = folder / "nats.conf"
    config.write_text(f'{text}\nports_file_dir: "{folder}"\nlog_file: "{log_path(folder)}"\n')
    program, *arguments = service["command"]
    assert program == "nats-server"
    process = await asyncio.create_subprocess_exec(
        find(),
        *(str(config) if argument == NATS_CONF else argument for argument in arguments),
        env=service["environment"],
    )
    try:
        yield (await wait_ready(process, "antiphon-nats", folder, START_TIMEOUT_S)).url
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
