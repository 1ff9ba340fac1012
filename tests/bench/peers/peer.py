"""A peer: another server of the same model, in an environment of its own, and its process."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from antiphon.supervisor.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.bench.models import Model

OURS = "antiphon"
REPOSITORY = Path(__file__).resolve().parents[3]
TORCH = "torch==2.13.0"
_CUDA_BUILDS = ("torchvision", "torchaudio", "torchcodec")
_INSTALL_TIMEOUT_S = 3600.0


class NotHere(Exception):
    """This peer is not available on this machine; the message gives the reason for the report."""


class Peer(ABC):
    """One server that could be chosen instead.

    Attributes:
        arithmetic: Its dtypes, shown below the table.
        package: The one in its environment whose version is that of the server.
        ignores_eos: Whether it takes `ignore_eos`, a field of vLLM's that most have.
        reads_gguf: Whether it serves a GGUF file.
    """

    name: ClassVar[str]
    arithmetic: ClassVar[str]
    package: ClassVar[str] = ""
    starts_in_s: ClassVar[float] = 300.0
    ignores_eos: ClassVar[bool] = True
    reads_gguf: ClassVar[bool] = False

    def __init__(self, cache: Path, cores: int) -> None:
        self.folder = cache / "peers" / self.name
        self.cores = cores

    @property
    def version(self) -> str:
        return package_version(self.folder / "venv", self.package)

    @abstractmethod
    def install(self) -> None:
        """Install what is not there yet.

        Raises:
            NotHere: It is not possible, with the reason.
        """

    def convert(self, model: Model) -> None:
        """Do what `prepare` does, of a model that this peer can serve.

        Raises:
            NotHere: It cannot, or converting failed; with the reason.
        """
        if model.gguf and not self.reads_gguf:
            raise NotHere(f"{self.name} is not given GGUF files")
        self.prepare(model)

    def prepare(self, model: Model) -> None:  # noqa: B027 most servers keep it
        """Convert the model, once; a server that reads its folder as it is has nothing to do.

        Raises:
            NotHere: It is not possible, with the reason.
        """

    @abstractmethod
    def command(self, model: Model, port: int) -> list[str]:
        """Return the command line of an OpenAI server that calls the model by its name."""

    def served(self, model: Model) -> str:
        return model.name

    def environment(self, name: str, *installs: Sequence[str]) -> Path:
        """Return a virtual environment of this peer, made first by `pip install`, a call each."""
        folder = self.folder / name
        if not (folder / "ready").exists():
            shutil.rmtree(folder, ignore_errors=True)
            self.run([sys.executable, "-m", "venv", str(folder)], f"making {name}")
            for arguments in installs:
                self.run([str(folder / "bin" / "pip"), "install", "-q", *arguments], f"{arguments}")
            (folder / "ready").touch()
        return folder

    def without_cuda(self, environment: Path) -> Path:
        """Remove CUDA builds that came along: they break imports beside a CPU torch."""
        pip = str(environment / "bin" / "pip")
        self.run([pip, "uninstall", "-q", "-y", *_CUDA_BUILDS], "removing CUDA builds")
        return environment

    def run(self, command: Sequence[str], what: str) -> None:
        """Run a step of an installation to its end, with low priority, its output in a log.

        Raises:
            NotHere: It failed; carries the end of its output.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        log = self.folder / "install.log"
        with log.open("ab") as output:
            output.write(f"$ {shlex.join(command)}\n".encode())
            output.flush()
            try:
                done = subprocess.run(
                    ["nice", "-n", "19", *command],
                    stdout=output,
                    stderr=output,
                    check=False,
                    timeout=_INSTALL_TIMEOUT_S,
                )
            except subprocess.TimeoutExpired:
                raise NotHere(f"{what}: not done in {_INSTALL_TIMEOUT_S:g} s") from None
        if done.returncode:
            last = log.read_text(errors="replace").strip().splitlines()[-1][:300]
            raise NotHere(f"{what}: {last}")


def config_digest(peer: Peer, model: Model) -> str:
    """Digest a command line, leaving out the port and where things are kept."""
    places = (str(peer.folder.parent.parent), sys.prefix, str(REPOSITORY))
    words = peer.command(model, 0)
    for place in places:
        words = [word.replace(place, "") for word in words]
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:12]


def package_version(environment: Path, package: str) -> str:
    code = f"from importlib.metadata import version; print(version({package!r}))"
    python = str(environment / "bin" / "python")
    return subprocess.run(
        [python, "-c", code], capture_output=True, check=True, text=True
    ).stdout.strip()


POLL_S = 0.25
STOP_S = 30.0


@dataclass(frozen=True)
class Server:
    """A server that answers; all its processes descend from `pid`."""

    url: str
    model: str
    pid: int
    started_in_s: float


@contextmanager
def running(peer: Peer, model: Model) -> Iterator[Server]:
    """Start a server, give it when it is healthy, stop all of it when left.

    Raises:
        NotHere: It ended or stayed silent; carries the end of its log.
    """
    port = free_port("127.0.0.1")
    began_s = time.monotonic()
    peer.folder.mkdir(parents=True, exist_ok=True)
    log = peer.folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            peer.command(model, port),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    watch = _watch(process)
    try:
        url = f"http://127.0.0.1:{port}"
        if not _healthy_in(process, url, peer.starts_in_s):
            said = " | ".join(log.read_text(errors="replace").strip().splitlines()[-3:])
            raise NotHere(f"it did not start: {said[-500:].replace(str(Path.home()), '~')}")
        yield Server(url, peer.served(model), process.pid, time.monotonic() - began_s)
    finally:
        _stop(process)
        watch.communicate()


def _watch(process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
    """Start what ends the whole group should we be killed before we can.

    Its input ends when we do. That a server dies with its parent would not be enough: the workers
    of some servers live on without it, and spoil whatever is measured next.
    """
    return subprocess.Popen(
        ["sh", "-c", f"cat; kill -KILL -{process.pid}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _healthy_in(process: subprocess.Popen[bytes], url: str, timeout_s: float) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < deadline_s:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
                if answer.status == 200:
                    return True
        except (urllib.error.URLError, OSError):
            pass  # not listening yet, or still loading
        time.sleep(POLL_S)
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask once; end what is left of the group, which is ours alone."""
    if process.poll() is None:
        # Not SIGINT, which background jobs of a shell ignore.
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
