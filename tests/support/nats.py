"""A real nats-server for tests, with a port of its own, that can be killed and paused."""

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
    """Runs a nats-server while entered. Its name is checked, so that no other server is used.

    With `durable` it has JetStream, whose streams survive `kill`. Its port is reserved as long as
    it is entered, also after `kill`.
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
        """The process; fails if it is not started."""
        assert self._running is not None, "the server is not started"
        return self._running

    @property
    def url(self) -> str:
        """The URL to connect to; unchanged by a restart."""
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
        """Start, at the same port as before if any."""
        if self._reservation is None:
            self._reservation = _reserve_port(self.settings.host, max(self.settings.port, 0))
            _, port = self._reservation.getsockname()
            self.settings = replace(self.settings, port=port)
        self._running = await start(self.settings, self.folder)

    async def kill(self) -> None:
        """Kill it, as a crash would. Does nothing if it has ended."""
        process = self.running.process
        if process.returncode is None:
            process.kill()
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()

    async def pause(self) -> None:
        self.running.process.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(STOP_TIMEOUT_S):
            while not _is_stopped(self.running.process.pid):  # noqa: ASYNC110  # there is no event
                await asyncio.sleep(POLL_S)

    def resume(self) -> None:
        self.running.process.send_signal(signal.SIGCONT)

    def _leave(self) -> None:
        if self._reservation is not None:
            self._reservation.close()
        self._temporary.cleanup()


def _reserve_port(host: str, port: int) -> socket.socket:
    """Bind a port without listening, 0 for any: only the server can then use it.

    Otherwise another process could take the port while the server is down.
    """
    reservation = socket.socket()
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind((host, port))
    return reservation


def _is_stopped(pid: int) -> bool:
    """Whether the kernel has stopped all threads; a signal takes a while to reach them."""
    states = [
        stat.read_text().rpartition(")")[2].split()[0]
        for stat in Path(f"/proc/{pid}/task").glob("*/stat")
    ]
    return set(states) == {"T"}
