"""Our own nats-server is found, named and started, or says why not."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING

import pytest
from tests.support.nats import NatsServer

from antiphon.bus import server
from antiphon.bus.server import ServerFailed, ServerMissing, ServerSettings, find, name_at, start

if TYPE_CHECKING:
    from pathlib import Path


def test_program_is_found_or_missed_with_advice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", "")
    assert find().name == "nats-server"
    program = tmp_path / "my-nats"
    program.touch(mode=0o755)
    assert find(str(program)) == program
    with pytest.raises(ServerMissing, match=r"no-such.*releases.*ANTIPHON_NATS_SERVER"):
        find(str(tmp_path / "no-such"))
    monkeypatch.setattr(server, "FOLDERS", "/nonexistent")
    with pytest.raises(ServerMissing, match=r"package `nats-server`"):
        find()


async def test_server_is_ready_under_its_name_on_its_own_port() -> None:
    begun = time.monotonic()
    async with NatsServer(ServerSettings(name="first")) as first, NatsServer() as second:
        assert time.monotonic() - begun < 5
        assert first.url != second.url
        assert await name_at(first.url) == "first"
    assert await name_at(first.url) is None


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 400 Bad Request\r\n", b"x" * 200_000])
async def test_other_servers_have_no_name(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even who takes the connection, and then keeps it without a word."""
    monkeypatch.setattr(server, "ANSWER_TIMEOUT_S", 0.2)
    stopped = asyncio.Event()

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        try:
            await stopped.wait()
        finally:
            writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as other:
        host, port = other.sockets[0].getsockname()
        assert await name_at(f"nats://{host}:{port}") is None
        stopped.set()


async def test_monitoring_is_served_where_it_says() -> None:
    async with NatsServer(ServerSettings(name="watched", monitoring_port=-1)) as watched:
        url = watched.running.monitoring_url
        assert url is not None
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert b"200 OK" in await reader.readline()
        writer.close()


async def test_start_that_fails_says_why_at_once(tmp_path: Path) -> None:
    begun = time.monotonic()
    with pytest.raises(ServerFailed, match="ended with 1"):
        await start(ServerSettings(name="bad", users="nonsense {{{\n"), tmp_path)
    assert time.monotonic() - begun < 5
    async with NatsServer() as running:
        port = int(running.url.rpartition(":")[2])
        with pytest.raises(ServerFailed, match="address already in use"):
            await start(ServerSettings(name="second", port=port), tmp_path)


async def test_server_that_does_not_come_up_is_ended(tmp_path: Path) -> None:
    program = tmp_path / "sleeper"
    program.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 60\n")
    program.chmod(0o755)
    with pytest.raises(ServerFailed, match=r"not ready in 0\.5 s"):
        await start(ServerSettings(name="mute"), tmp_path, program=program, timeout_s=0.5)
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_config_with_passwords_is_readable_by_the_owner_only(tmp_path: Path) -> None:
    path = server.write_config(ServerSettings(name="secret"), tmp_path)
    assert path.stat().st_mode & 0o077 == 0
