"""A blob server outlives what keeps it from accepting connections."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec
from tests.unit.transfer.test_transfer import listener, take

from antiphon.transfer import blobs
from antiphon.transfer.blobs import BlobGone, BlobServer, BlobStore
from antiphon.wire.claim import Claim

if TYPE_CHECKING:
    import socket

    import pytest

CHILD = """
import asyncio, logging, resource, sys
import msgspec, uvloop
from antiphon.service.startup import bind
from antiphon.transfer.blobs import BlobServer, BlobStore

async def serve():
    bound = bind("127.0.0.1", 0)
    store = BlobStore("127.0.0.1:%d" % bound.getsockname()[1], 1 << 20, lambda: 0)
    claim = store.put(b"bytes", 60)
    open_files = len(__import__("os").listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files + 8, open_files + 8))
    print(msgspec.json.encode(claim).decode(), flush=True)
    await BlobServer(bound, store).run()

logging.basicConfig(level=logging.INFO, stream=sys.stderr)
uvloop.run(serve())
"""


async def test_blob_server_outlives_running_out_of_files() -> None:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CHILD, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stderr is not None
    try:
        async with asyncio.timeout(30):
            claim = msgspec.json.decode(await child.stdout.readline(), type=Claim)
            host, port = claim.address.split(":")
            idle = [await asyncio.open_connection(host, int(port)) for _ in range(24)]
            line = await child.stderr.readline()
            assert b"connection not accepted" in line
            assert child.returncode is None
            for _, writer in idle:
                writer.close()
            while True:  # until those that were closed have been taken in, and left
                try:
                    assert await take(claim) == b"bytes"
                    break
                except BlobGone:
                    continue
            assert b"accepted again" in await child.stderr.readline()
    finally:
        child.kill()
        await child.wait()


async def test_blob_server_accepts_again_and_logs_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(blobs, "ACCEPT_PAUSE_S", 0.0)
    loop, failures = asyncio.get_running_loop(), 0
    accept = loop.sock_accept

    async def sock_accept(bound: socket.socket) -> tuple[socket.socket, object]:
        nonlocal failures
        if failures < 50:
            failures += 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return await accept(bound)

    monkeypatch.setattr(loop, "sock_accept", sock_accept)
    bound, address = listener()
    store = BlobStore(address, 1024, lambda: 0)
    with bound, caplog.at_level("INFO"):
        async with asyncio.TaskGroup() as group:
            running = group.create_task(BlobServer(bound, store).run())
            assert await take(store.put(b"bytes", 60)) == b"bytes"
            running.cancel()
    assert failures == 50
    assert [record.message for record in caplog.records] == [
        "connection not accepted",
        "connections are accepted again",
    ]


async def test_blob_server_outlives_a_source_that_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(BlobStore):
        broken = True

        def get(self, token: str) -> bytes | None:
            if self.broken:
                raise ValueError("a bug, on purpose")
            return super().get(token)

    bound, address = listener()
    store = Broken(address, 1024, lambda: 0)
    claim = store.put(b"bytes", 60)
    with bound:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(BlobServer(bound, store).run())
            try:
                await take(claim)
            except BlobGone:
                store.broken = False
            assert await take(claim) == b"bytes"
            running.cancel()
    assert "a bug, on purpose" in caplog.text
