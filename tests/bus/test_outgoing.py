"""Writing to one socket from several threads, with a real connection beneath."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from antiphon.bus.tcp import ThreadSafeWriter

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

FRAME_BYTES = 600_000
LENGTH_BYTES = 8


class Near(asyncio.Protocol):
    """Records only the end of the stream."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()


@dataclass
class Line:
    """A way out, the transport below it, and the other end."""

    outgoing: ThreadSafeWriter
    transport: asyncio.Transport
    near: Near
    reader: asyncio.StreamReader
    far: asyncio.WriteTransport


@asynccontextmanager
async def connected() -> AsyncGenerator[Line]:
    loop = asyncio.get_running_loop()
    accepted: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
    accepted = loop.create_future()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set_result((reader, writer))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    transport, near = await loop.create_connection(Near, host, port)
    reader, writer = await accepted
    line = Line(ThreadSafeWriter(transport, loop), transport, near, reader, writer.transport)
    try:
        yield line
    finally:
        line.outgoing.close()
        transport.abort()
        writer.transport.abort()
        server.close()


def frame(writer: int, number: int) -> bytes:
    body = b"%d %d " % (writer, number)
    body += bytes([writer]) * (FRAME_BYTES // (1 + number % 7))
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, int]:
    length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
    body = await reader.readexactly(length)
    writer, number, rest = body.split(b" ", 2)
    assert set(rest) == {int(writer)}, "another writer's bytes are among them"
    return int(writer), int(number)


async def count_frames(reader: asyncio.StreamReader) -> int:
    """Whole frames until the connection ends."""
    count = 0
    async with asyncio.timeout(20):
        while True:
            try:
                await read_frame(reader)
            except (asyncio.IncompleteReadError, ConnectionError):
                return count
            count += 1


async def test_frames_of_several_threads_arrive_whole_and_each_ones_in_order() -> None:
    threads, frames = 4, 40
    async with connected() as line:
        outgoing, reader = line.outgoing, line.reader

        def write(writer: int) -> None:
            for number in range(frames):
                outgoing.write(frame(writer, number))

        workers = [threading.Thread(target=write, args=(one,)) for one in range(1, threads)]
        for worker in workers:
            worker.start()
        write(0)  # nothing reads yet: the kernel accepts less than this
        assert outgoing.get_write_buffer_size() > 0
        seen: dict[int, list[int]] = {}
        async with asyncio.timeout(20):
            for _ in range(threads * frames):
                writer, number = await read_frame(reader)
                seen.setdefault(writer, []).append(number)
        for worker in workers:
            worker.join()
        assert seen == {writer: list(range(frames)) for writer in range(threads)}
        assert outgoing.get_write_buffer_size() == 0
        outgoing.write(frame(0, frames))
        assert await read_frame(reader) == (0, frames)


async def test_what_waits_when_it_is_closed_is_never_written() -> None:
    async with connected() as line:
        outgoing, whole = line.outgoing, 0
        while not outgoing.get_write_buffer_size():
            outgoing.write(frame(1, whole))
            whole += 1
        outgoing.close()
        outgoing.close()
        outgoing.write(frame(1, whole))
        assert outgoing.get_write_buffer_size() == 0
        line.transport.abort()
        assert await count_frames(line.reader) < whole


async def test_broken_connection_takes_everything_and_keeps_nothing() -> None:
    async with connected() as line:
        at_once = struct.pack("ii", 1, 0)  # and by a reset
        line.far.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        line.far.abort()
        async with asyncio.timeout(20):
            await line.near.ended.wait()
        for number in range(50):
            line.outgoing.write(frame(1, number))
            assert line.outgoing.get_write_buffer_size() == 0


async def test_writer_that_fails_ends_the_stream_of_its_reader() -> None:
    async with connected() as line:
        line.transport.get_extra_info("socket").shutdown(socket.SHUT_WR)
        line.outgoing.write(frame(1, 0))
        assert line.outgoing.get_write_buffer_size() == 0
        async with asyncio.timeout(20):
            await line.near.ended.wait()
