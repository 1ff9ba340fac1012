"""Bytes arrive whole over a real socket, or an error says why not; a server outlives faults."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import socket
import subprocess
import sys
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from msgspec.structs import replace
from tests.support.clock import ManualClock
from tests.support.wait import until

from antiphon.service.startup import bind
from antiphon.transfer import blobs
from antiphon.transfer.blobs import (
    BlobCorrupt,
    BlobGone,
    BlobServer,
    BlobSource,
    BlobStore,
    BlobUnreachable,
    fetch,
    fetch_all,
    fetch_range,
    new_token,
    part_digests,
)
from antiphon.wire.claim import Claim
from antiphon.wire.errors import InvalidRequest, Overloaded, RequestTooLarge

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

MIB = 1024 * 1024


def listener() -> tuple[socket.socket, str]:
    bound = bind("127.0.0.1", 0)
    return bound, f"127.0.0.1:{bound.getsockname()[1]}"


@asynccontextmanager
async def serving(
    bound: socket.socket, source: BlobSource, *, sent: Callable[[str], None] | None = None
) -> AsyncGenerator[None]:
    with bound:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(BlobServer(bound, source, sent=sent).run())
            try:
                yield
            finally:
                running.cancel()


@asynccontextmanager
async def shelf(bytes_max: int = 64 * MIB) -> AsyncGenerator[tuple[BlobStore, ManualClock]]:
    bound, address = listener()
    clock = ManualClock()
    holder = BlobStore(address, bytes_max, clock)
    async with serving(bound, holder):
        yield holder, clock


async def take(claim: Claim, bytes_max: int = 64 * MIB) -> bytearray:
    return await fetch(claim, timeout_s=5, bytes_max=bytes_max)


@pytest.mark.parametrize("size", [0, 1, 64 * 1024, 8 * MIB + 3])
async def test_what_was_put_is_fetched(size: int):
    data = bytes(i % 251 for i in range(min(size, 4096))) * (size // 4096 + 1)
    async with shelf() as (holder, _):
        claim = holder.put(data[:size], 60)
        assert await take(claim) == data[:size]
        assert await take(claim) == data[:size]


async def test_several_claims_come_over_one_connection_in_order():
    async with shelf() as (holder, _):
        claims = [holder.put(bytes([i]) * 100, 60) for i in range(20)]
        blobs = await fetch_all(claims, timeout_s=5, bytes_max=MIB)
    assert [blob[0] for blob in blobs] == list(range(20))


@pytest.mark.parametrize("size", [10, 30, 31])
async def test_ranges_are_parts_that_are_verified_each(size: int) -> None:
    data = os.urandom(size)
    async with shelf() as (store, _):
        claim = store.put(data, 60, part_bytes=10, part_digests=part_digests(data, 10))
        for start in range(size):
            for end in range(start + 1, size + 1):
                assert await fetch_range(claim, start, end, timeout_s=5) == data[start:end]
        assert await fetch(claim, timeout_s=5, bytes_max=size) == data
        wrong = replace(claim, part_digests=bytes(10 * 32)[: len(claim.part_digests)])
        with pytest.raises(BlobCorrupt, match="checksum"):
            await fetch_range(wrong, 0, 1, timeout_s=5)
        digests = (claim.part_digests + bytes(32))[: (size + 10) // 10 * 32]
        longer = replace(claim, size_bytes=size + 1, part_digests=digests)
        with pytest.raises(BlobCorrupt, match="size"):
            await fetch_range(longer, size, size + 1, timeout_s=5)
        for start, end in ((0, 0), (1, size + 1), (-1, 1)):
            with pytest.raises(InvalidRequest, match="has none from"):
                await fetch_range(claim, start, end, timeout_s=5)
        with pytest.raises(InvalidRequest, match="no checksums of parts"):
            await fetch_range(replace(claim, part_digests=b""), 0, 1, timeout_s=5)
        store.discard(claim)
        with pytest.raises(BlobGone):
            await fetch_range(claim, 0, 1, timeout_s=5)


async def test_unknown_token_and_an_expired_one_are_gone():
    async with shelf() as (holder, clock):
        claim = holder.put(b"x", 1)
        with pytest.raises(BlobGone):
            await take(replace(claim, token=new_token()))
        clock.advance(1.001)
        with pytest.raises(BlobGone):
            await take(claim)
        holder.sweep()
        assert holder.bytes_held == 0


@pytest.mark.parametrize("step_s", [-3600.0, 3600.0])
async def test_a_step_of_the_wall_clock_neither_drops_nor_keeps_bytes(step_s: float):
    async with shelf() as (holder, clock):
        claim = holder.put(b"x", 60)
        clock.step_wall(step_s)
        assert await take(claim) == b"x"
        assert holder.left_s(claim) == 60
        clock.advance(60.001)
        assert holder.get(claim.token) is None
        assert holder.left_s(claim) == 0
        holder.sweep()
        assert holder.bytes_held == 0
        assert holder.left_s(claim) == 0


def test_blobs_are_looked_at_only_when_one_may_have_expired() -> None:
    """Many calls that wait for room in a full store ask again and again."""
    looks = 0

    class Counted(dict[str, Any]):
        def items(self) -> Any:
            nonlocal looks
            looks += 1
            return super().items()

    clock = ManualClock()
    store = BlobStore("a:1", 9, clock)
    store._blobs = Counted()
    for lifetime_s in (3, 1, 2):
        store.put(bytes(3), lifetime_s)
    for seconds, fits in ((1, False), (0.5, True), (0.5, False), (0.5, True), (1, True)):
        clock.advance(seconds)
        found = [store.reserve(3) for _ in range(5)]
        assert found == [fits, *[False] * 4]
    assert looks == 3
    assert store.bytes_held == 9


async def test_fetch_from_an_address_without_server_is_gone():
    async with shelf() as (holder, _):
        claim = holder.put(b"x", 60)
    with pytest.raises(BlobGone):
        await take(claim)


async def test_another_checksum_or_size_is_corrupt_and_a_large_claim_refused():
    async with shelf() as (holder, _):
        claim = holder.put(b"some bytes", 60)
        with pytest.raises(BlobCorrupt):
            await take(replace(claim, digest=hashlib.sha256(b"others").digest()))
        with pytest.raises(BlobCorrupt):
            await take(replace(claim, size_bytes=3))
        with pytest.raises(RequestTooLarge):
            await take(claim, bytes_max=9)


async def test_holder_that_hangs_up_in_the_middle_is_gone():
    bound, address = listener()
    claim = BlobStore(address, MIB, ManualClock()).put(b"x" * 100, 60)

    async def half() -> None:
        loop = asyncio.get_running_loop()
        connection, _ = await loop.sock_accept(bound)
        with connection:
            await loop.sock_sendall(connection, (100).to_bytes(8, "little") + b"x" * 50)

    with bound:
        async with asyncio.TaskGroup() as group:
            group.create_task(half())
            with pytest.raises(BlobGone):
                await take(claim)


async def test_holder_that_says_nothing_is_gone_in_time():
    bound, address = listener()
    claim = BlobStore(address, MIB, ManualClock()).put(b"x", 60)
    with bound, pytest.raises(BlobGone):
        await fetch(claim, timeout_s=0.05, bytes_max=MIB)


async def test_host_that_answers_nothing_is_unreachable_before_the_fetch_is_late(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(blobs, "CONNECT_TIMEOUT_S", 0.05)
    bound, address = listener()
    bound.listen(0)
    claim = BlobStore(address, MIB, ManualClock()).put(b"x", 60)
    with bound, ExitStack() as stack:
        for _ in range(4):  # the kernel takes no more
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(bound.getsockname())
        with pytest.raises(BlobUnreachable):
            await fetch(claim, timeout_s=1000, bytes_max=MIB)


@pytest.mark.parametrize(
    "address",
    ["", "nowhere", ":1", "host:x", "127.0.0.1:0", "127.0.0.1:65536", "127.0.0.1:" + "9" * 999],
)
async def test_malformed_address_is_the_callers_error(address: str):
    claim = BlobStore(address, MIB, ManualClock()).put(b"x", 60)
    with pytest.raises(InvalidRequest):
        await take(claim)


async def test_full_shelf_refuses_until_something_expires():
    async with shelf(bytes_max=100) as (holder, clock):
        holder.put(b"x" * 80, 1)
        with pytest.raises(Overloaded):
            holder.put(b"y" * 30, 1)
        with pytest.raises(RequestTooLarge):
            holder.put(b"y" * 101, 1)
        clock.advance(1.001)
        holder.put(b"y" * 30, 1)
        assert holder.bytes_held == 30


async def test_what_was_sent_to_its_end_gives_way_to_what_finds_no_room() -> None:
    bound, address = listener()
    store = BlobStore(address, 100, ManualClock())
    sent = list[str]()

    def spare(token: str) -> None:
        store.spare(token)
        sent.append(token)

    async with serving(bound, store, sent=spare):
        data = os.urandom(40)
        first = store.put(data, 60, part_bytes=20, part_digests=part_digests(data, 20))
        second = store.put(b"y" * 40, 60)
        await fetch_range(first, 0, 20, timeout_s=5)
        with pytest.raises(Overloaded):
            store.put(b"z" * 40, 60)
        await fetch_range(first, 10, 40, timeout_s=5)
        await take(second)
        await until(lambda: sent == [first.token, second.token])
        store.retain(first)  # given out once more
        third = store.put(b"z" * 40, 60)
        assert store.bytes_held == 80
        assert await take(first) == data
        with pytest.raises(BlobGone):
            await take(second)
        assert await take(third) == b"z" * 40


async def test_stranger_is_hung_up_on():
    async with shelf() as (holder, _):
        host, _, port = holder.put(b"x", 60).address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()


CHILD = """
import asyncio, logging, resource, sys
import msgspec, uvloop
from antiphon.service.clock import SystemClock
from antiphon.service.startup import bind
from antiphon.transfer.blobs import BlobServer, BlobStore

async def serve():
    bound = bind("127.0.0.1", 0)
    store = BlobStore("127.0.0.1:%d" % bound.getsockname()[1], 1 << 20, SystemClock())
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
    with caplog.at_level("INFO"):
        async with shelf() as (holder, _):
            assert await take(holder.put(b"bytes", 60)) == b"bytes"
    assert failures == 50
    assert [record.message for record in caplog.records] == [
        "connection not accepted",
        "connections are accepted again",
    ]


async def test_blob_server_outlives_a_source_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(BlobStore):
        broken = True

        def get(self, token: str) -> bytes | bytearray | memoryview | None:
            if self.broken:
                raise ValueError("a bug, on purpose")
            return super().get(token)

    bound, address = listener()
    store = Broken(address, 1024, ManualClock())
    claim = store.put(b"bytes", 60)
    async with serving(bound, store):
        with pytest.raises(BlobGone):
            await take(claim)
        store.broken = False
        assert await take(claim) == b"bytes"
    assert "a bug, on purpose" in caplog.text
