"""compose/ says what it means, and what it starts works: with the users of nats.conf, for real."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml
from openai import AsyncOpenAI
from tests.support.wait import until

from antiphon.bus.permissions import STORE_PATH, users
from antiphon.bus.server import find, log_path, wait_ready
from antiphon.client import Client
from antiphon.config.gateway import GatewayConfig
from antiphon.config.load import child_environment, load
from antiphon.config.settings import Settings
from antiphon.supervisor.ports import free_port
from antiphon.wire.ids import ClusterName

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
    """Name free ports, each once."""
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


SERVICES = sorted(path.parent.name for path in (ROOT / "services/antiphon").glob("*/__main__.py"))
OVERLAYS = ("compose.gpu.yaml", "compose.nats-cluster.yaml", "compose.observability.yaml")
MORE_WORKERS = {
    "model_worker-1": ["workers-2", "workers-4"],
    "model_worker-2": ["workers-4"],
    "model_worker-3": ["workers-4"],
}
"""Of the GPU overlay, with their profiles."""
SAVED_BLOCK = re.compile(r'^antiphon_saved_blocks_total\{.*result="stored".*\} [1-9]', re.MULTILINE)
LEAVE_S = 4.0
"""What a process may take after its drain, before it ends itself."""


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables of a fresh .env."""
    folder = tmp_path_factory.mktemp("secrets")
    return make_env(folder)


def make_env(folder: Path) -> dict[str, str]:
    for name in ("secrets.sh", ".env.example"):
        shutil.copy(COMPOSE / name, folder)
    subprocess.run([folder / "secrets.sh"], check=True, timeout=20)
    lines = (folder / ".env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@pytest.fixture(scope="module")
def services(secrets: dict[str, str]) -> dict[str, dict]:
    return read_compose("compose.yaml", secrets)["services"]


def seconds(text: str) -> float:
    number, unit = text[:-1], text[-1]
    return float(number) * {"s": 1, "m": 60}[unit]


def test_secrets_are_random_private_and_made_once(tmp_path: Path):
    made = make_env(tmp_path)
    assert stat.S_IMODE((tmp_path / ".env").stat().st_mode) == 0o600
    assert len(set(made.values())) == len(made)
    assert all(re.fullmatch("[a-z][a-z0-9]{16,}", secret) for secret in made.values())
    assert make_env(tmp_path) == made


def test_a_password_that_is_missing_is_asked_for(secrets: dict[str, str]):
    for name in secrets:
        rest = {key: text for key, text in secrets.items() if key != name}
        others = {
            "GRAFANA_PASSWORD": "compose.observability.yaml",
            "ROUTES_PASSWORD": "compose.nats-cluster.yaml",
        }
        file = others.get(name, "compose.yaml")
        with pytest.raises(KeyError, match=name):
            read_compose(file, rest)


def test_the_stack_is_nats_and_every_service_of_the_repository(services: dict[str, dict]):
    assert sorted(services) == sorted([*SERVICES, "nats"])


@pytest.mark.parametrize("name", [*SERVICES, "nats"])
def test_a_container_has_no_more_rights_than_it_needs(name: str, services: dict[str, dict]):
    service = services[name]
    user, group = service["user"].split(":")
    assert int(user) > 0
    assert int(group) > 0
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


@pytest.mark.parametrize("name", [*SERVICES, "nats"])
def test_a_container_is_watched_and_waits_for_what_it_needs(name: str, services: dict[str, dict]):
    service = services[name]
    assert service["restart"] == "unless-stopped"
    assert service["healthcheck"]["test"][0] == "CMD"
    waits = service.get("depends_on", {})
    assert ("nats" in waits) == (name != "nats")
    for needed, how in waits.items():
        assert needed in services
        assert how["condition"] in {"service_healthy", "service_started"}
    if name == "gateway":  # so that it stops first
        assert set(waits) == set(services) - {"gateway"}
    else:
        assert set(waits) <= {"nats"}


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_built_for_its_name_and_configured_as_it_understands(
    name: str, services: dict[str, dict]
):
    service = services[name]
    build = service["build"]
    assert build["args"] == {"SERVICE": name}
    assert (COMPOSE / build["context"]).resolve() == ROOT
    dockerfile = (ROOT / build["dockerfile"]).read_text()
    assert re.search(rf"^FROM \w+ AS {name}$", dockerfile, re.MULTILINE)
    settings = load(environ=service["environment"]).settings
    assert settings.bus.url == "nats://nats:4222"
    assert settings.health.port == 8081
    assert f":{settings.health.port}/readyz" in service["healthcheck"]["test"][-1]
    listening = {
        "gateway": settings.gateway.host,
        "encoder": settings.encoder.host,
        "kv_storage": settings.kv_storage.host,
        "model_worker": settings.cache.host,
    }
    assert {settings.health.host, listening.get(name, "0.0.0.0")} == {"0.0.0.0"}
    drain_s = settings.service.drain_timeout_s
    assert seconds(service["stop_grace_period"]) > drain_s + LEAVE_S


def test_each_service_is_given_its_own_password_and_nats_all(
    services: dict[str, dict], secrets: dict[str, str]
):
    variables = {user.name: user.password.removeprefix("$") for user in users(ClusterName("a"))}
    assert services["nats"]["environment"] == {name: secrets[name] for name in variables.values()}
    roles = {}
    for name in SERVICES:
        environment = services[name]["environment"]
        roles[name] = environment["ANTIPHON_BUS__USER"]
        assert environment["ANTIPHON_BUS__PASSWORD"] == secrets[variables[roles[name]]]
        assert [text for text in environment.values() if text in secrets.values()] == [
            environment["ANTIPHON_BUS__PASSWORD"]
        ]
    assert roles == {name: name for name in SERVICES} | {"model_worker": "worker"}


def test_published_ports_are_those_that_the_processes_listen_on(services: dict[str, dict]):
    published = {name: s["ports"] for name, s in services.items() if "ports" in s}
    assert published == {
        "nats": ["127.0.0.1:4222:4222"],
        "gateway": [f"127.0.0.1:30000:{GatewayConfig().port}"],
    }


@pytest.mark.parametrize("file", ["compose.yaml", *OVERLAYS])
def test_a_file_names_what_is_there(file: str, secrets: dict[str, str]):
    content = read_compose(file, secrets)
    assert "name" not in content  # docker-compose 1.29 refuses it
    for service in content["services"].values():
        for mount in service.get("volumes", []):
            source = mount.partition(":")[0]
            if source.startswith("."):
                assert (COMPOSE / source).exists()
            elif not source.startswith("/"):
                assert source in content["volumes"]
        if "build" in service:
            assert (ROOT / service["build"]["dockerfile"]).exists()


def test_nats_reads_the_file_that_is_mounted(services: dict[str, dict]):
    stored = f"stored:{Path(STORE_PATH).parent}"
    assert services["nats"]["volumes"] == [f"./nats.conf:{NATS_CONF}:ro", stored]
    assert services["nats"]["command"][-1] == NATS_CONF


def test_the_gpu_overlay_changes_what_computes_and_nothing_else(
    services: dict[str, dict], secrets: dict[str, str]
):
    overlay = read_compose("compose.gpu.yaml", secrets)["services"]
    assert set(overlay) == {"model_worker", *MORE_WORKERS, "encoder"}
    for name, service in overlay.items():
        assert service["image"] != services[name.partition("-")[0]]["image"]
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device["capabilities"] == ["gpu"]


def test_each_worker_of_the_gpu_overlay_has_a_gpu_or_a_group_of_its_own(
    services: dict[str, dict], secrets: dict[str, str]
):
    overlay = read_compose("compose.gpu.yaml", secrets)["services"]
    first = over(services["model_worker"], overlay["model_worker"])
    settings = load(environ=without_gpus(first)).settings
    assert (settings.model.device, settings.parallel.tp_size) == ("cuda", 1)
    gpus = [first["environment"]["CUDA_VISIBLE_DEVICES"]]
    for name, profiles in MORE_WORKERS.items():
        worker = overlay[name]
        assert worker.pop("profiles") == profiles
        gpus.append(worker["environment"]["CUDA_VISIBLE_DEVICES"])
        assert without_gpus(worker) == without_gpus(first)
        assert {**worker, "environment": {}} == {**first, "environment": {}}
    assert gpus == ["0", "1", "2", "3"]
    groups = {"RANKS": "2", "WORKER_0_GPUS": "0,1", "WORKER_1_GPUS": "2,3"}
    overlay = read_compose("compose.gpu.yaml", secrets | groups)["services"]
    for name, own in (("model_worker", "0,1"), ("model_worker-1", "2,3")):
        environment = overlay[name]["environment"]
        assert environment["CUDA_VISIBLE_DEVICES"] == own
        assert environment["ANTIPHON_PARALLEL__TP_SIZE"] == "2"


def over(service: Mapping, overlay: Mapping) -> dict:
    """A service with that of an overlay, as compose merges them."""
    merged = {**service, **overlay}
    for name in ("build", "environment"):
        merged[name] = {**service[name], **overlay[name]}
    merged["tmpfs"] = service["tmpfs"] + overlay["tmpfs"]
    return merged


def without_gpus(service: Mapping) -> dict[str, str]:
    environment = dict(service["environment"])
    del environment["CUDA_VISIBLE_DEVICES"]
    return environment


async def test_servers_of_the_cluster_overlay_connect_to_each_other_only_with_the_password(
    services: dict[str, dict], secrets: dict[str, str], tmp_path: Path
):
    """Their commands, as they are but for addresses and folders of this machine."""
    overlay = read_compose("compose.nats-cluster.yaml", secrets)["services"]
    names = ["nats", "nats-1", "nats-2"]
    assert {name for name in overlay if name not in services} == {"nats-1", "nats-2"}
    for name in SERVICES:
        url = overlay[name]["environment"]["ANTIPHON_BUS__URL"]
        assert url == ",".join(f"nats://{host}:4222" for host in names)
    ports = dict(zip((*names, "intruder"), free_ports(4), strict=True))
    passwords = {key: value for key, value in secrets.items() if key.startswith("NATS_")}

    def command(name: str, like: str) -> list[str]:
        text = "\n".join(overlay[like]["command"])
        text = text.replace("0.0.0.0:6222", f"127.0.0.1:{ports[name]}")
        for host in names:
            text = text.replace(f"@{host}:6222", f"@127.0.0.1:{ports[host]}")
        file = tmp_path / f"{name}.conf"
        users = (COMPOSE / "nats.conf").read_text()
        file.write_text(users.replace(f'"{STORE_PATH}"', f'"{tmp_path / name}"'))
        _, *words = text.replace(NATS_CONF, str(file)).split("\n")
        address = ["--addr=127.0.0.1", "--port=-1", "--http_port=-1"]
        return [str(find()), *words, f"--log={logs[name]}", *address]

    logs = {name: tmp_path / f"{name}.log" for name in ports}

    def log(*of: str) -> str:
        return "".join(logs[name].read_text() for name in of if logs[name].exists())

    intruder = [
        word.replace(secrets["ROUTES_PASSWORD"], "guess").replace("=antiphon-nats", "=intruder")
        for word in command("intruder", "nats")
    ]
    commands = [*(command(name, name) for name in names), intruder]
    running = [await asyncio.create_subprocess_exec(*each, env=passwords) for each in commands]
    try:
        await until(lambda: "JetStream cluster metadata leader" in log(*names), 20)
        await until(lambda: "uthentication" in log("intruder", *names), 20)
    finally:
        for process in running:
            if process.returncode is None:
                process.kill()
            await process.wait()


@pytest.mark.parametrize("dockerfile", ["Dockerfile", "Dockerfile.gpu"])
def test_an_image_copies_what_docker_is_given_and_ends_unprivileged(dockerfile: str):
    text = (COMPOSE / dockerfile).read_text()
    ignore = (ROOT / ".dockerignore").read_text().split()
    copied = " ".join(re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE)).split()
    assert "services" in copied
    for source in copied:
        assert f"!{source}" in ignore
        assert (ROOT / source).exists()
    assert re.findall(r"^USER (.+)$", text, re.MULTILINE) == ["10001:10001"]
    assert text.rstrip().endswith('ENTRYPOINT ["service"]')
    assert 'exec python -m antiphon.%s "$@"' in text


def test_prometheus_asks_a_gateway_where_it_answers(services: dict[str, dict]):
    content = yaml.safe_load((COMPOSE / "prometheus/prometheus.yaml").read_text())
    (job,) = content["scrape_configs"]
    (found,) = job["static_configs"]
    port = services["gateway"]["environment"]["ANTIPHON_HEALTH__PORT"]
    assert found["targets"] == [f"gateway:{port}"]


@pytest.mark.parametrize("overlay", [None, *OVERLAYS])
def test_docker_compose_accepts_it(overlay: str | None, secrets: dict[str, str]):
    program = shutil.which("docker-compose")
    if program is None:
        pytest.skip("no docker-compose on this machine; the tests above need none")
    files = ["compose.yaml", *([overlay] if overlay else [])]
    result = subprocess.run(
        [program, *(part for file in files for part in ("-f", file)), "config", "--quiet"],
        cwd=COMPOSE,
        env=child_environment(Settings()) | secrets,
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.system
@pytest.mark.timeout(240)
async def test_the_same_commands_without_containers_hold_a_conversation(
    secrets: dict[str, str], tmp_path: Path
):
    stored = {"HIERARCHICAL_CACHE": "true", "CACHE_STORAGE": "kv_storage"}
    async with composed(secrets | stored, tmp_path) as stack:
        for name in SERVICES:
            assert await stack.probe(name) == 0, name
        over_http = await ask_over_http(stack.url)
        over_nats = await ask_over_nats(stack.nats_url, secrets["NATS_CLIENT_DEFAULT_PASSWORD"])
        assert over_http == over_nats
        assert "42" in over_http
        await leave_early(stack.nats_url, secrets["NATS_CLIENT_DEFAULT_PASSWORD"])
        drawn = dashboard_metrics()
        await until(lambda: all(name in stack.metrics("gateway") for name in drawn), 15)
        await ask_over_http(stack.url, "What is 17 + 25? " * 12)
        await until(lambda: SAVED_BLOCK.search(stack.metrics("gateway")) is not None, 15)
        for name in sorted(SERVICES, key=lambda name: name != "gateway"):
            assert await stack.stop(name) == 0, stack.log(name)
        assert await stack.probe("gateway") != 0
        for name in SERVICES:
            assert "broker refused" not in stack.log(name)
    assert "Violation" not in (tmp_path / "nats.log").read_text()


async def ask_over_http(url: str, question: str = "What is 17 + 25?") -> str:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.create(
            model="antiphon-small",
            messages=[{"role": "user", "content": question}],
            temperature=0,
        )
    return answer.choices[0].message.content or ""


async def ask_over_nats(url: str, password: str) -> str:
    async with Client(url, user="client-default", password=password) as client:
        pieces = client.generate("antiphon-small", "What is 17 + 25?", temperature=0.0)
        return "".join([piece.text async for piece in pieces])


async def leave_early(url: str, password: str) -> None:
    async with Client(url, user="client-default", password=password) as client:
        pieces = client.generate("antiphon-small", "Count from 1 to 20.", ignore_eos=True)
        async with aclosing(pieces):
            assert (await anext(pieces)).text


def dashboard_metrics() -> set[str]:
    """Return every metric that the dashboard draws and that is there from the beginning."""
    content = json.loads((COMPOSE / "grafana/dashboards/antiphon.json").read_text())
    asked = [target["expr"] for panel in content["panels"] for target in panel["targets"]]
    # Losses and errors have series once there are any; until then the dashboard draws zero.
    drawn = [expression for expression in asked if not expression.endswith("or vector(0)")]
    return set(re.findall(r"antiphon_\w+", " ".join(drawn)))
