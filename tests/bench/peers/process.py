"""One server as a process group of its own: started, waited for, stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.bench.peers.peer import NotHere

from antiphon.supervisor.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.bench.models import Model
    from tests.bench.peers.peer import Peer

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
            raise NotHere(f"it did not start: {said[-500:]}")
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
