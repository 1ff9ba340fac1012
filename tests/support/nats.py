"""A real nats-server for tests: a port of its own, faults at will, gone afterwards."""

from __future__ import annotations

import asyncio
import signal
import socket
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Self
from uuid import uuid4

from antiphon.bus.server import RunningServer, ServerSettings, start

STOP_TIMEOUT_S = 5.0
POLL_S = 0.002


class NatsServer:
    """Runs a nats-server while entered. The name is checked, so that no other is meant.

    With `durable` it has JetStream, whose streams outlive `kill`. Its port is its own as long as it
    is entered, also while it is killed.
    """

    def __init__(self, settings: ServerSettings | None = None, *, durable: bool = False) -> None:
        self.settings = settings or ServerSettings(name=f"test-{uuid4().hex[:8]}")
        self._temporary = tempfile.TemporaryDirectory(prefix="antiphon-nats-")
        self.folder = Path(self._temporary.name)
        if durable:
            self.settings = replace(self.settings, store_path=str(self.folder / "jetstream"))
        self._running: RunningServer | None = None
        self._reservation: socket.socket | None = None

    @property
    def running(self) -> RunningServer:
        """The process; an assertion while there is none."""
        assert self._running is not None, "the server is not started"
        return self._running

    @property
    def url(self) -> str:
        """Where to connect to; stays the same over a restart."""
        return self.running.url

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            self._leave()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        try:
            await self.kill()
        finally:
            self._leave()

    async def start(self) -> None:
        """Start, at the port of the last time if there was one."""
        if self._reservation is None:
            self._reservation = _reserve_port(self.settings.host, max(self.settings.port, 0))
            _, port = self._reservation.getsockname()
            self.settings = replace(self.settings, port=port)
        self._running = await start(self.settings, self.folder)

    async def kill(self) -> None:
        """End it at once, as a crash does. Does nothing to one that has ended."""
        process = self.running.process
        if process.returncode is None:
            process.kill()
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()

    async def pause(self) -> None:
        """Freeze it: connections stay open and nothing moves. Returns when every thread stands."""
        self.running.process.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(STOP_TIMEOUT_S):
            while not _stands(self.running.process.pid):  # noqa: ASYNC110  # no event tells
                await asyncio.sleep(POLL_S)

    def resume(self) -> None:
        """Let a frozen one go on."""
        self.running.process.send_signal(signal.SIGCONT)

    def _leave(self) -> None:
        if self._reservation is not None:
            self._reservation.close()
        self._temporary.cleanup()


def _reserve_port(host: str, port: int) -> socket.socket:
    """Bind a port without listening, 0 for any: a server may take it, but nobody gets it by chance.

    Else a process beside this one could have it while the server is killed.
    """
    reservation = socket.socket()
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind((host, port))
    return reservation


def _stands(pid: int) -> bool:
    """Whether the kernel has stopped every thread; a signal takes a while to reach them."""
    states = [
        stat.read_text().rpartition(")")[2].split()[0]
        for stat in Path(f"/proc/{pid}/task").glob("*/stat")
    ]
    return set(states) == {"T"}
