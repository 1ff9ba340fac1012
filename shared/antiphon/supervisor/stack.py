"""The processes of one machine: started, announced, restarted, stopped in order."""

from __future__ import annotations

import asyncio
import os
import platform
import re
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Self

from msgspec.structs import replace
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from antiphon.bus.bus import Bus
from antiphon.bus.nats import NatsTransport
from antiphon.bus.transport import BusDown
from antiphon.config.errors import ConfigError
from antiphon.config.fields import fields
from antiphon.config.load import child_environment, nats_server
from antiphon.config.tenants import read_tenants
from antiphon.model_card.card import read_card
from antiphon.model_card.served_model import (
    check_template,
    draft_files,
    model_files,
    tokenizer_folder,
)
from antiphon.resolve.device import HostDevice, detect_device
from antiphon.resolve.draft import check_draft, check_draft_tokenizer, naming_draft
from antiphon.resolve.memory import HOST_POOL_BYTES_MAX
from antiphon.resolve.steps import check_context
from antiphon.service.tasks import gather
from antiphon.service.web import server_context
from antiphon.supervisor.broker import ANY_PORT, PORT, Broker, Passwords
from antiphon.supervisor.child import Child
from antiphon.supervisor.liveness import HangDetector, Readiness
from antiphon.supervisor.ports import PortRange, free_port, is_free
from antiphon.wire.base import Process, Role
from antiphon.wire.heartbeat import ProcessExited
from antiphon.wire.ids import ClusterName, InstanceId, new_incarnation
from antiphon.wire.routes import EXIT, OPERATOR

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
    from pathlib import Path

    from rich.console import Console

    from antiphon.config.settings import Settings

START_ORDER = (
    Role.WORKER,  # takes longest to be ready
    Role.SCHEDULER,
    Role.TOKENIZER,
    Role.DETOKENIZER,
    Role.ENCODER,
    Role.KV_STORAGE,
    Role.GATEWAY,
)
STOP_ORDER = (frozenset({Role.GATEWAY}), frozenset(Role) - {Role.GATEWAY})
"""The gateway first: it accepts no new requests and finishes open ones; then all others."""


_FLAGS = {
    "workers": "--dp-size",
    "tokenizers": "--tokenizer-worker-num",
    "detokenizers": "--detokenizer-worker-num",
    "schedulers": "--supervisor-schedulers",
    "encoders": "--supervisor-encoders",
}
"""The settings with numbers of processes, and their short flags."""

LOG_CHECK_S = 60.0
LOOK_BEATS = 2
"""How many heartbeat intervals to look for other processes on the operator's broker."""


EXAMPLE = """try: curl -N {scheme}://{host}:{port}/v1/chat/completions \\
  -H 'Content-Type: application/json' \\{key}
  -d '{{"stream": true, "messages": [{{"role": "user", "content": "What is 17 + 25?"}}]}}'"""

EXAMPLE_KEY = """
  -H "Authorization: Bearer $KEY" \\"""
BAR_COLUMNS = 12
"""Narrow enough for lines of at most 80 columns, whatever service it waits for."""
_LOADING = re.compile(r"(done_bytes|total_bytes|seconds_left)\W+([\d.]+)")


class CannotServe(Exception):
    """A process did not start. The message says which, why, and where to look."""


class ServiceStack:
    """NATS, unless `bus.url` names a server, and all services of one machine, `device`."""

    def __init__(
        self, settings: Settings, folder: Path, console: Console, device: HostDevice | None = None
    ) -> None:
        gateway = settings.gateway
        if not gateway.port:  # chosen here, since it must be announced
            settings = replace(settings, gateway=replace(gateway, port=free_port(gateway.host)))
        self._settings = settings = _with_attention_groups(settings)
        self._device = device or detect_device()
        self._folder = folder
        self._console = console
        access = settings.access
        self._keys = bool(access.api_key or access.keys_file)
        self._passwords: Passwords | None = None
        self._broker: Broker | None = None
        self._children: Sequence[Child] = ()

    async def run(self, stop: asyncio.Event, now: asyncio.Event) -> None:
        """Serve until `stop`; then finish running requests, until `now` at the latest.

        ConfigError: nothing was started. CannotServe, ServerMissing and ServerFailed: a process did
        not start, and all were stopped.
        """
        self._check()
        try:
            url = await self._start_broker()
            if self._broker is None:
                await self._refuse_if_taken(url)
            self._children = self.children(url)
            for child in self._children:
                await child.start()
            readiness = await self._wait_ready(url, stop)
            if not stop.is_set():
                self._announce(url, readiness)
                async with self._listening(url, readiness) as bus:
                    await self._supervise(stop, readiness, bus)
        finally:
            await self._stop(now)

    def _check(self) -> None:
        """Check what would fail in a child anyway, so that the operator sees the error at once."""
        gateway = self._settings.gateway
        if self._settings.supervisor.encoder_only:
            _check_encoders(self._settings)
        elif gateway.port and not is_free(gateway.host, gateway.port):
            port = f"port {gateway.port} on {gateway.host}"
            raise CannotServe(f"{port} is in use; choose another with --port")
        nats_port = self._settings.supervisor.nats_port
        if nats_port and not self._settings.bus.url and not is_free("127.0.0.1", nats_port):
            raise CannotServe(f"port {nats_port} is in use; choose another with --nats-port")
        drain_s = self._settings.service.drain_timeout_s
        stop_s = self._settings.supervisor.stop_timeout_s
        if stop_s <= drain_s:
            raise ConfigError(
                f"supervisor.stop_timeout_s = {stop_s:g}: must be more than "
                f"service.drain_timeout_s = {drain_s:g}, or a process is killed while it drains"
            )
        _check_counts(self._settings, self._device)
        parallel = self._settings.parallel
        parallel.check()
        if parallel.node_rank:
            raise ConfigError(
                f"parallel.node_rank = {parallel.node_rank} (--node-rank): serve runs on node 0; "
                "start python -m antiphon.model_worker on the others"
            )
        read_tenants(self._settings.access.keys_file)
        server_context(gateway)
        check_template(self._settings)
        card = read_card(model_files(self._settings))
        check_context(self._settings, card)
        if (draft := draft_files(self._settings)) is not None:
            with naming_draft(self._settings.speculation.draft_model):
                draft_card = read_card(draft)
            check_draft(self._settings, card, draft_card)
            check_draft_tokenizer(self._settings)
        tokenizer_folder(self._settings)

    async def _start_broker(self) -> str:
        bus = self._settings.bus
        if bus.url:
            return bus.url
        users = ""
        if self._keys:  # else clients of the broker could bypass the gateway and its API keys
            self._passwords = Passwords(ClusterName(self._settings.cluster.name))
            users = self._passwords.server_text()
        port = self._settings.supervisor.nats_port
        self._broker = Broker(
            self._folder,
            nats_server(),
            bus.payload_bytes_max,
            # In nats-server's own config, port 0 is its default port.
            port=PORT if port is None else port or ANY_PORT,
            users=users,
        )
        await self._broker.start()
        return self._broker.running.url

    async def _refuse_if_taken(self, url: str) -> None:
        """Check that no process on the operator's NATS has a name of ours; names are exclusive."""
        names = [name for role in START_ORDER for name in _instances(self._settings, role)]
        present = Readiness(names, lambda _: None)
        async with self._listening(url, present):
            await asyncio.sleep(LOOK_BEATS * self._settings.service.heartbeat_s)
        taken = [name for name in names if name in present.heartbeats]
        if taken:
            raise CannotServe(
                f"another `antiphon serve` at {url} already runs {', '.join(taken)}; "
                "choose another --cluster-name"
            )

    def children(self, url: str) -> tuple[Child, ...]:
        """The processes of all services, not yet started, for the NATS server at `url`."""
        settings = replace(self._settings, bus=replace(self._settings.bus, url=url))
        environment = child_environment(settings)
        ports = PortRange(settings.health.host, settings.supervisor.metrics_port_base)
        return tuple(
            Child(
                role=role,
                instance=instance,
                settings=settings,
                config=self._folder / "settings.yaml",
                log_folder=self._folder / "logs",
                environment={**environment, **self._environment(settings, role, number)},
                ports=ports,
            )
            for role in START_ORDER
            for number, instance in enumerate(_instances(settings, role))
        )

    def _environment(self, settings: Settings, role: Role, number: int) -> Mapping[str, str]:
        """The environment of a process: its NATS user and its share of the machine."""
        share = process_share(settings, role, number, self._device)
        return share if self._passwords is None else {**self._passwords.environment(role), **share}

    async def _wait_ready(self, url: str, stop: asyncio.Event) -> Readiness:
        """Wait until all are ready, one has died, `stop` is set, or the start timeout is over."""
        names = [child.instance for child in self._children]
        # The first in the order of start, a worker where there is one, takes longest.
        with StartProgress(self._console, names, self._children[0].log_tail) as progress:
            readiness = Readiness(names, lambda beat: progress.ready(beat.process.instance))
            async with self._listening(url, readiness):
                await self._wait_for_first(readiness, stop)
        if not stop.is_set():
            self._refuse_if_late(readiness)
        return readiness

    @asynccontextmanager
    async def _listening(self, url: str, readiness: Readiness) -> AsyncGenerator[Bus]:
        name = InstanceId(f"supervisor-{os.getpid()}")
        config = replace(self._settings.bus, url=url)
        if self._passwords is not None:
            config = replace(config, user=OPERATOR, password=self._passwords.operator)
        bus = Bus(
            NatsTransport(config, name=name),
            ClusterName(self._settings.cluster.name),
            Process(instance=name, incarnation=new_incarnation()),
            party=OPERATOR,
        )
        try:
            async with bus:
                await readiness.listen(bus)
                yield bus
        except BusDown as error:
            raise CannotServe(f"no NATS server responds at {url}: {error}") from error

    async def _wait_for_first(self, readiness: Readiness, stop: asyncio.Event) -> None:
        """Return when all are ready, `stop` is set, one has died, or the timeout is over."""
        settled = asyncio.Event()
        deaths = [child.fails_to_start for child in self._children]
        waits = (readiness.all_ready.wait, stop.wait, *deaths)
        async with asyncio.TaskGroup() as group:
            watches = [group.create_task(_set_after(wait, settled)) for wait in waits]
            with suppress(TimeoutError):
                async with asyncio.timeout(self._settings.supervisor.start_timeout_s):
                    await settled.wait()
            for watch in watches:
                watch.cancel()

    def _refuse_if_late(self, readiness: Readiness) -> None:
        late = [child for child in self._children if child.instance in readiness.waiting]
        dead = [child for child in late if not child.alive]
        for child in dead or late:
            if dead and (reason := child.refusals()):
                raise CannotServe(f"{child.instance} cannot start: {reason}")
            became = "exited during startup" if dead else "was not ready in time"
            raise CannotServe(f"{child.instance} {became}. The end of its log:\n{child.log_tail()}")

    def _announce(self, url: str, readiness: Readiness) -> None:
        encoder_only = self._settings.supervisor.encoder_only
        beats = sorted(readiness.heartbeats.items())
        if encoder_only:  # not those of the server
            own = {child.instance for child in self._children}
            beats = [(name, beat) for name, beat in beats if name in own]
        ports = ", ".join(f"{name} {beat.health_port}" for name, beat in beats)
        if encoder_only:
            ready = (
                f"[green]ready[/green] encoders · model {beats[0][1].model} · NATS {url} · "
                f"logs {self._folder / 'logs'} · metrics ({ports})"
            )
            self._console.print(ready, highlight=False, soft_wrap=True)
            return
        gateway = readiness.heartbeats[_instances(self._settings, Role.GATEWAY)[0]]
        host, port = self._settings.gateway.host, self._settings.gateway.port
        scheme = self._settings.gateway.scheme
        ready = (
            f"[green]ready[/green] API {scheme}://{host}:{port}/v1 · model {gateway.model} · "
            f"NATS {url} · logs {self._folder / 'logs'} · "
            f"metrics {scheme}://{host}:{port}/metrics ({ports})"
        )
        key = EXAMPLE_KEY if self._keys else ""
        for text in (ready, EXAMPLE.format(scheme=scheme, host=host, port=port, key=key)):
            self._console.print(text, highlight=False, soft_wrap=True)

    async def _supervise(self, stop: asyncio.Event, readiness: Readiness, bus: Bus) -> None:
        timeout_s = self._settings.supervisor.hang_timeout_s
        hangs = HangDetector(
            self._children, readiness.health_port, self._settings.health, timeout_s
        )
        kept = [
            partial(child.keep_running, partial(_announce_exit, child.instance, readiness, bus))
            for child in self._children
        ]
        jobs = [self._trim_logs, hangs.run, *kept]
        if self._broker is not None:
            jobs.append(self._broker.keep_running)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(job()) for job in jobs]
            await stop.wait()
            for task in tasks:
                task.cancel()

    async def _trim_logs(self) -> None:
        while True:
            await asyncio.sleep(LOG_CHECK_S)
            for child in self._children:
                await asyncio.to_thread(child.trim_log)

    async def _stop(self, now: asyncio.Event) -> None:
        """Stop the gateway first, so that running requests can finish; then the rest, then NATS."""
        timeout_s = self._settings.supervisor.stop_timeout_s
        async with asyncio.TaskGroup() as group:
            kill = group.create_task(self._kill_at(now))
            for roles in STOP_ORDER:
                stopped = (child for child in self._children if child.role in roles)
                await gather([child.stop(timeout_s) for child in stopped])
            kill.cancel()
        if self._broker is not None:
            await self._broker.stop()

    async def _kill_at(self, now: asyncio.Event) -> None:
        await now.wait()
        for child in self._children:
            child.kill()


def _announce_exit(instance: InstanceId, readiness: Readiness, bus: Bus) -> None:
    """Let all others know of a death at once, so that they need not wait for its silence."""
    if (beat := readiness.heartbeats.get(instance)) is None:
        return
    with suppress(BusDown):  # then they notice the silence
        bus.publish(EXIT, ProcessExited(process=beat.process), instance=instance)


async def _set_after(wait: Callable[[], Awaitable[object]], event: asyncio.Event) -> None:
    await wait()
    event.set()


def _with_attention_groups(settings: Settings) -> Settings:
    """With `supervisor.workers` as the number of attention groups, where it stands for these.

    Raises:
        ConfigError: That is set otherwise.
    """
    supervisor, parallel = settings.supervisor, settings.parallel
    if not supervisor.dp_attention:
        return settings
    if parallel.attn_dp_size not in (1, supervisor.workers):
        raise ConfigError(
            f"parallel.attn_dp_size = {parallel.attn_dp_size} (--attn-dp-size): "
            f"supervisor.workers = {supervisor.workers} (--dp-size) is the number of attention "
            "groups with supervisor.dp_attention (--enable-dp-attention); set one of them"
        )
    return replace(settings, parallel=replace(parallel, attn_dp_size=supervisor.workers))


def _instances(settings: Settings, role: Role) -> Sequence[InstanceId]:
    name = str(role)
    if settings.supervisor.encoder_only:  # beside those of other machines
        name += "-" + re.sub(r"\W", "-", platform.node())
    return tuple(InstanceId(f"{name}-{number}") for number in range(_count(settings, role)))


def _check_encoders(settings: Settings) -> None:
    """Check that encoders alone have something to do."""
    only = "supervisor.encoder_only (--encoder-only)"
    if not settings.bus.url:
        raise ConfigError(f"{only}: set bus.url (--bus-url) to the NATS server of those they serve")
    if not settings.supervisor.encoders:
        raise ConfigError(
            f"supervisor.encoders = 0 (--language-only): with {only} nothing would be started"
        )


def _check_counts(settings: Settings, device: HostDevice) -> None:
    supervisor, running_max = settings.supervisor, settings.batching.running_max
    for name, flag in _FLAGS.items():
        count, most = getattr(supervisor, name), f"{device.cores}, the number of cores"
        if count > device.cores:
            raise ConfigError(f"supervisor.{name} = {count} ({flag}): must be at most {most}")
    if supervisor.workers > running_max:
        raise ConfigError(
            f"batching.running_max = {running_max} (--max-running-requests): must be at least "
            f"supervisor.workers = {supervisor.workers} (--dp-size), since workers share it"
        )
    if _count(settings, Role.WORKER) > 1 and settings.model.device.startswith("cuda:"):
        raise ConfigError(
            f"model.device = {settings.model.device} (--device): supervisor.workers = "
            f"{supervisor.workers} (--dp-size) cannot share one GPU; with cuda, each has its own"
        )


def process_share(
    settings: Settings, role: Role, number: int, device: HostDevice
) -> Mapping[str, str]:
    """Return the environment variables of a process's share, if others share the machine with it.

    Memory is that of `device`, measured before any process was started: a restarted process finds
    less free memory but may use as much as before. A worker on GPUs has one of its own a rank.
    Encoders share the cores with each other and with workers that compute on the CPU.
    """
    count = _count(settings, role)
    if count == 1 and role is not Role.ENCODER:
        return {}
    values: dict[str, int | str] = {}
    if role is Role.WORKER:
        model = settings.model
        values = {
            "model.cores": model.cores or device.cores // count,
            "batching.running_max": settings.batching.running_max // count,
        }
        if model.device == "cuda":
            values["model.device"] = f"cuda:{number * len(settings.parallel.local_ranks)}"
        else:
            pool = settings.cache.bytes_max or HOST_POOL_BYTES_MAX
            values["model.memory_bytes"] = model.memory_bytes or device.memory_bytes // count
            values["cache.bytes_max"] = max(pool // count, 1)
    elif role is Role.TOKENIZER:
        values = {"tokenizer.threads": min(settings.tokenizer.threads, device.cores // count)}
    elif role is Role.ENCODER:
        on_cpu = not settings.model.device.startswith("cuda")
        computing = count + (_count(settings, Role.WORKER) if on_cpu else 0)
        values = {"encoder.threads": settings.encoder.threads or max(1, device.cores // computing)}
    return {fields()[path].variable: str(value) for path, value in values.items()}


def _count(settings: Settings, role: Role) -> int:
    supervisor = settings.supervisor
    if supervisor.encoder_only:
        return supervisor.encoders if role is Role.ENCODER else 0
    counts = {
        Role.WORKER: 1 if supervisor.dp_attention else supervisor.workers,
        Role.TOKENIZER: supervisor.tokenizers,
        Role.DETOKENIZER: supervisor.detokenizers,
        Role.SCHEDULER: supervisor.schedulers,
        Role.ENCODER: supervisor.encoders,
    }
    return counts.get(role, 1)


def loading(log: str) -> str:
    """Format the progress of loading weights from a worker's log; empty if none is in progress."""
    lines = [line for line in log.splitlines() if "weights" in line]
    if not lines or "loading weights" not in lines[-1]:
        return ""
    fields = {name: float(number) for name, number in _LOADING.findall(lines[-1])}
    if len(fields) < 3:
        return ""
    done, total = fields["done_bytes"] / 1e9, fields["total_bytes"] / 1e9
    return f"weights {done:.2f} of {total:.2f} GB, {fields['seconds_left']:.0f} s left"


class _Waiting(ProgressColumn):
    """Progress of loading weights, read twice a second; else the service that is awaited."""

    max_refresh = 0.5

    def __init__(self, progress: Callable[[], str]) -> None:
        super().__init__()
        self._progress = progress

    def render(self, task: Task) -> Text:
        return Text(self._progress() or task.description)


class StartProgress:
    """A progress bar in a terminal; one line per service elsewhere.

    `worker_log` is the end of the worker's log, which has the progress of its weights.
    """

    def __init__(
        self, console: Console, names: Sequence[str], worker_log: Callable[[], str]
    ) -> None:
        self._console = console
        self._waiting = list(names)
        self._bar = Progress(
            TextColumn("starting"),
            BarColumn(bar_width=BAR_COLUMNS),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            _Waiting(lambda: loading(worker_log())),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(self._description(), total=len(names))

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def ready(self, name: str) -> None:
        if name in self._waiting:
            self._waiting.remove(name)
        self._bar.update(self._task, advance=1, description=self._description())
        if not self._console.is_terminal:
            self._console.print(f"{name} is ready", highlight=False)

    def _description(self) -> str:
        if not self._waiting:
            return "all ready"
        first, *others = self._waiting
        return f"waiting for {first}" + (f" and {len(others)} more" if others else "")
