"""Find, configure and start a nats-server: for `antiphon serve` and tests."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FOLDERS = "/usr/sbin:/usr/local/sbin:/usr/local/bin"
"""Where packages install it; not on every user's PATH."""
READY_TIMEOUT_S = 10.0
POLL_S = 0.02
ANSWER_TIMEOUT_S = 2.0
"""A NATS server sends its INFO line at once; a slower one is another server, or frozen."""
LOG_TAIL_CHARS = 2000


class ServerMissing(Exception):
    """nats-server is not installed; the message says where to get it."""


class ServerFailed(Exception):
    """nats-server did not start; the message has the end of its log."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of a nats-server; all others keep their defaults."""

    name: str  # server name, sent to clients, which detects another server on the same port
    host: str = "127.0.0.1"
    port: int = -1  # -1: any free port
    # Port of its HTTP monitoring; -1: any free port, None: no monitoring.
    monitoring_port: int | None = None
    payload_bytes_max: int = 1024 * 1024
    ping_interval_s: int = 10
    write_deadline_s: int = 5
    store_path: str = ""  # storage directory of JetStream; empty: JetStream is disabled
    # Config text of its users (`antiphon.bus.permissions`); empty: no authentication.
    users: str = ""


class _Ports(msgspec.Struct):
    nats: tuple[str, ...] = ()
    monitoring: tuple[str, ...] = ()


class _Info(msgspec.Struct):
    """The INFO line of a server; other fields are ignored."""

    server_name: str


@dataclass(frozen=True, kw_only=True)
class RunningServer:
    process: asyncio.subprocess.Process
    url: str
    monitoring_url: str | None


def find(override: str = "") -> Path:
    """Find the nats-server program: `override` (ANTIPHON_NATS_SERVER), PATH, the usual folders."""
    name = override or "nats-server"
    found = shutil.which(name) or (None if override else shutil.which(name, path=FOLDERS))
    if found is None:
        raise ServerMissing(
            f"no program {name!r} on PATH or in {FOLDERS}. Install the package `nats-server` "
            "(Debian, Ubuntu, Homebrew), or take a release from "
            "https://github.com/nats-io/nats-server/releases and name it in ANTIPHON_NATS_SERVER."
        )
    return Path(found)


def config_text(settings: ServerSettings) -> str:
    """Format the settings in nats-server's configuration language; compose uses it, too."""
    lines = [
        f"server_name: {settings.name}",
        f'listen: "{settings.host}:{settings.port}"',
        f"max_payload: {settings.payload_bytes_max}",
        "# A dead client is found in half a minute, a slow one is closed in seconds.",
        f'ping_interval: "{settings.ping_interval_s}s"',
        "ping_max: 2",
        f'write_deadline: "{settings.write_deadline_s}s"',
    ]
    if settings.monitoring_port is not None:
        lines.append(f'http: "{settings.host}:{settings.monitoring_port}"')
    if settings.store_path:
        lines.append(f'jetstream: {{store_dir: "{settings.store_path}"}}')
    return "\n".join(lines) + "\n" + settings.users


def write_config(settings: ServerSettings, folder: Path) -> Path:
    """Write `nats.conf` into `folder`, where the server also writes its log and ports file."""
    # Readable by the owner only: it may hold passwords.
    path = folder / "nats.conf"
    path.touch(mode=0o600)
    path.write_text(
        config_text(settings)
        + f'ports_file_dir: "{folder}"\nlog_file: "{log_path(folder)}"\nlogtime: true\n'
    )
    return path


def command(program: Path, config: Path) -> Sequence[str]:
    return (str(program), "-c", str(config))


def log_path(folder: Path) -> Path:
    return folder / "nats.log"


async def start(
    settings: ServerSettings,
    folder: Path,
    program: Path | None = None,
    before_exec: Callable[[], None] | None = None,
    timeout_s: float = READY_TIMEOUT_S,
) -> RunningServer:
    """Start a server and return when it responds with its name; one that is not ready is killed.

    `before_exec` runs in the child process, for example to make it die with its parent.
    """
    config = write_config(settings, folder)
    process = await asyncio.create_subprocess_exec(
        *command(program or find(), config),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        preexec_fn=before_exec,
    )
    try:
        return await wait_ready(process, settings.name, folder, timeout_s)
    except BaseException:
        if process.returncode is None:
            process.kill()
            await process.wait()
        raise


async def wait_ready(
    process: asyncio.subprocess.Process, name: str, folder: Path, timeout_s: float
) -> RunningServer:
    try:
        async with asyncio.timeout(timeout_s):
            while process.returncode is None:
                ports = _read_ports(folder, process.pid)
                if ports is not None and await name_at(ports.nats[0]) == name:
                    url, monitoring = ports.nats[0], next(iter(ports.monitoring), None)
                    return RunningServer(process=process, url=url, monitoring_url=monitoring)
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        late = f"nats-server was not ready in {timeout_s:g} s"
        raise ServerFailed(f"{late}: {_log_tail(folder)}") from None
    raise ServerFailed(f"nats-server ended with {process.returncode}: {_log_tail(folder)}")


async def name_at(url: str) -> str | None:
    """Return the name of the NATS server at `nats://host:port`; None if there is none."""
    # A server that accepts the connection but sends nothing within `ANSWER_TIMEOUT_S` counts as
    # none.
    host, _, port = url.removeprefix("nats://").rpartition(":")
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                line = await reader.readline()
            finally:
                writer.close()
        return msgspec.json.decode(line.removeprefix(b"INFO "), type=_Info).server_name
    except (OSError, ValueError, msgspec.DecodeError):  # ValueError: the line is too long.
        return None


def _read_ports(folder: Path, pid: int) -> _Ports | None:
    for path in folder.glob(f"*_{pid}.ports"):
        try:
            ports = msgspec.json.decode(path.read_bytes(), type=_Ports)
        except msgspec.DecodeError:
            return None  # Half written.
        return ports if ports.nats else None
    return None


def _log_tail(folder: Path) -> str:
    path = log_path(folder)
    return path.read_text(errors="replace")[-LOG_TAIL_CHARS:] if path.exists() else "(no log)"
