"""Many clients in one process, which take the time of an event and do nothing else with it.

Raw sockets and no HTTP library: a parser would take more of the two cores than the gateway.

    python -m tests.bench.crowd.listeners PORT STREAMS TOKENS

Prints `ready` when every stream has begun, measures between two lines on standard input, and prints
the result.
"""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import msgspec
import numpy as np
import uvloop
from tests.bench.peers.quiet import used_s

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.bench.services import EchoStack

QUESTION = "What is there to say of a sky that is blue in the morning and red at night? "
QUESTION_TOKENS_MIN = 17
_EVENT = b"data: {"
_LAST = b"0\r\n\r\n"
"""The end of a body in chunks; no chunk of events ends like this."""


class Received(msgspec.Struct, frozen=True):
    """What came between the two lines.

    Attributes:
        gaps_ms: Between two events of a stream, at the percentiles 50, 90, 99 and 100. Events that
            came at once, as they do behind a hold-up, have none between them.
        cpu_s: What listening took.
    """

    seconds: float
    events: int
    gaps_ms: tuple[float, float, float, float]
    cpu_s: float


@dataclass(frozen=True)
class Listeners:
    """A process of clients that listen to a stack, each to one stream after the other."""

    streams: int
    answer_tokens: int
    settle_s: float
    window_s: float

    def measure(
        self,
        stack: EchoStack,
        pids: Mapping[str, int],
        mark: Callable[[], None] = lambda: None,
    ) -> tuple[Received, dict[str, float]]:
        """Return what came in a window, and the processor time that each process used in it.

        `mark` is called at the beginning of the window and at its end.
        """
        port = stack.url.rpartition(":")[2]
        arguments = (port, str(self.streams), str(self.answer_tokens))
        with subprocess.Popen(
            [sys.executable, "-m", "tests.bench.crowd.listeners", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", "the clients did not start"
            time.sleep(self.settle_s)
            process.stdin.write("begin\n")
            before = used_s()
            mark()
            time.sleep(self.window_s)
            process.stdin.write("end\n")
            mark()
            after = used_s()
            received = msgspec.json.decode(process.stdout.readline(), type=Received)
        return received, {name: after[pid] - before[pid] for name, pid in pids.items()}


@dataclass
class Tally:
    begun: int = 0
    refused: bytes = b""
    events: int = 0
    gaps: list[float] = field(default_factory=list)
    since: float = field(default_factory=time.perf_counter)

    def empty(self) -> None:
        self.events, self.gaps, self.since = 0, [], time.perf_counter()


class Listener(asyncio.Protocol):
    def __init__(self, request: bytes, tally: Tally) -> None:
        self._request, self._tally = request, tally
        self._last_s, self._begun = 0.0, False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # as which uvloop's does not count
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        tally = self._tally
        if not self._begun:
            self._begun = True
            tally.begun += 1
            if not data.startswith(b"HTTP/1.1 200"):
                tally.refused = data
        if count := data.count(_EVENT):
            tally.events += count
            if self._last_s:
                # Of its first event only: those behind it in the same read came with it.
                tally.gaps.append(now - self._last_s)
            self._last_s = now
        if data.endswith(_LAST):
            self._last_s = 0.0
            self._transport.write(self._request)

    def connection_lost(self, exc: Exception | None) -> None:
        """The gateway ends no connection by itself, and we close none before the end."""


async def listen(port: int, streams: int, tokens: int) -> Received:
    """Open all streams, and measure between lines of standard input."""
    loop, tally = asyncio.get_running_loop(), Tally()
    asked = request(port, tokens)
    for _ in range(streams):
        await loop.create_connection(lambda: Listener(asked, tally), "127.0.0.1", port)
    while tally.begun < streams:  # noqa: ASYNC110  # events of raw sockets, no future to wait for
        await asyncio.sleep(0.05)
    assert not tally.refused, tally.refused
    print("ready", flush=True)
    await loop.run_in_executor(None, sys.stdin.readline)
    tally.empty()
    began_s = _cpu_s()
    await loop.run_in_executor(None, sys.stdin.readline)
    seconds, cpu_s = time.perf_counter() - tally.since, _cpu_s() - began_s
    gaps = np.array([*tally.gaps, *[0.0] * (tally.events - len(tally.gaps))]) * 1000
    p50, p90, p99, most = (float(each) for each in np.percentile(gaps, (50, 90, 99, 100)))
    return Received(seconds, tally.events, (p50, p90, p99, most), cpu_s)


def request(port: int, tokens: int) -> bytes:
    """Return a request for so many tokens; its prompt is longer, since the echo repeats that."""
    chat = {
        "model": "antiphon-small",
        "stream": True,
        "max_tokens": tokens,
        "ignore_eos": True,
        "messages": [{"role": "user", "content": QUESTION * (tokens // QUESTION_TOKENS_MIN + 1)}],
    }
    body = json.dumps(chat).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    port, streams, tokens = map(int, sys.argv[1:4])
    received = uvloop.run(listen(port, streams, tokens))
    print(msgspec.json.encode(received).decode(), flush=True)


if __name__ == "__main__":
    main()
