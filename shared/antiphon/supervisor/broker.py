"""The supervisor's own nats-server, restarted on the same port if it dies."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from antiphon.bus.permissions import NatsUser, anonymous_user, user, users_text
from antiphon.bus.server import RunningServer, ServerFailed, ServerSettings, find, start
from antiphon.service.startup import die_with
from antiphon.supervisor.child import Restarts, stop_process
from antiphon.supervisor.ports import is_free
from antiphon.wire.base import Role
from antiphon.wire.routes import OPERATOR

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from antiphon.wire.ids import ClusterName
    from antiphon.wire.routes import Party

log = logging.getLogger(__name__)

PORT = 4222
ANY_PORT = -1
STOP_TIMEOUT_S = 5.0


class Broker:
    """Runs nats-server on `port`, or on any free port if it is taken; restarts use the same port.

    `users` is the config text of its users; empty: no authentication.
    """

    def __init__(
        self, folder: Path, program: str, payload_bytes_max: int, port: int = PORT, users: str = ""
    ) -> None:
        self._folder = folder
        self._program = find(program)
        self._settings = ServerSettings(
            name=f"antiphon-{os.getpid()}",
            port=port if port > 0 and is_free("127.0.0.1", port) else ANY_PORT,
            payload_bytes_max=payload_bytes_max,
            users=users,
            store_path=str(folder / "jetstream"),
        )
        self._restarts = Restarts()
        self._running: RunningServer | None = None

    @property
    def running(self) -> RunningServer:
        assert self._running is not None, "the broker is not started"
        return self._running

    async def start(self) -> None:
        """Start the server, and return when it responds; raise `ServerFailed` if it does not."""
        try:
            self._running = await self._start()
        except ServerFailed:
            if self._running is not None or self._settings.port == ANY_PORT:
                raise
            # The port was taken since the check, by another stack that starts at the same time.
            self._settings = replace(self._settings, port=ANY_PORT)
            self._running = await self._start()
        port = urlsplit(self._running.url).port
        assert port is not None, self._running.url
        self._settings = replace(self._settings, port=port)

    async def keep_running(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            status = await self.running.process.wait()
            pause_s = self._restarts.pause_s(loop.time())
            log.warning("broker died", extra={"status": status, "pause_s": pause_s})
            await asyncio.sleep(pause_s)
            try:
                await self.start()
            except (ServerFailed, OSError) as error:
                log.warning("broker did not start", extra={"reason": str(error)})

    async def stop(self) -> None:
        if self._running is not None:
            await stop_process(self._running.process, STOP_TIMEOUT_S)

    async def _start(self) -> RunningServer:
        in_child = partial(_in_child, os.getpid())
        return await start(self._settings, self._folder, self._program, in_child)


def _in_child(parent_pid: int) -> None:
    """Leave the terminal's process group, so that Ctrl-C reaches only the supervisor."""
    os.setsid()
    die_with(parent_pid)


_PASSWORD_BYTES = 24


class Passwords:
    """One password per role, new at each start, for when API keys are configured.

    Connections without one are clients; otherwise a client could publish as a service.
    """

    def __init__(self, cluster: ClusterName) -> None:
        self._cluster = cluster
        self._passwords: Mapping[Party, str] = {
            party: f"p{secrets.token_hex(_PASSWORD_BYTES)}" for party in (*Role, OPERATOR)
        }

    def server_text(self) -> str:
        anonymous = anonymous_user(self._cluster)
        users = [*(self._user(party) for party in self._passwords), anonymous]
        return users_text(users) + f"no_auth_user: {anonymous.name}\n"

    def environment(self, role: Role) -> Mapping[str, str]:
        return {"ANTIPHON_BUS__USER": str(role), "ANTIPHON_BUS__PASSWORD": self._passwords[role]}

    @property
    def operator(self) -> str:
        return self._passwords[OPERATOR]

    def _user(self, party: Party) -> NatsUser:
        return replace(user(self._cluster, party), password=f'"{self._passwords[party]}"')
