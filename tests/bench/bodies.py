"""Large request bodies of one client beside eight streams of another tenant: gaps at clients.

Expected before measuring: every step of the gateway's and the tokenizer's event loop takes less
than 20 ms, and a child process occupies one core for up to two seconds, so that gaps at most double
while a body is parsed: on two cores some tens of ms at p99. The target is at most 300 ms for the
median difference.

A window is one run of eight streams of equal length; each window with a body follows one without.

    python -m tests.bench.bodies
    python -m tests.bench.bodies --rounds 1 --json FILE
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import aiohttp
import msgspec
from rich.console import Console
from rich.table import Table
from tests.bench.figures import Machine, machine
from tests.bench.summary import RESULTS, Measurement, Summary, measured, single, write_results
from tests.system.stack import Stack, serving
from tests.unit.gateway.keyed import key_of, write_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROUNDS = 5
STREAMS = 8
WINDOW_S = 4.0
"""About how long the streams of a window last; their tokens are chosen for it."""
TOKENS_MAX = 1900
AFTER_S = 0.5
"""From the beginning of a window to its body."""
DIFFERENCE_MS_MAX = 300.0
SENDER, OTHER = "sender", "other"
FILE = RESULTS / "bodies.json"

TURNS = [{"role": "user", "content": "a"}]
CALLS = "<|python_tag|>"
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {f"p{n}": {"type": "string", "enum": ["a", "b"]} for n in range(8000)},
        },
    },
}


@dataclass(frozen=True)
class Body:
    """What one client posts, and where."""

    name: str
    path: str
    make: Callable[[], object]


BODIES = (
    Body(
        "2.8 MB of tool-call markers",
        "/parse_function_call",
        lambda: {"text": CALLS * 200_000, "tools": [], "tool_call_parser": "llama3"},
    ),
    Body(
        "7 MB of reasoning text",
        "/separate_reasoning",
        lambda: {"text": "<think>" + "<th " * 1_700_000, "reasoning_parser": "qwen3"},
    ),
    Body(
        "260,000 messages (Anthropic)",
        "/v1/messages",
        lambda: {"max_tokens": 1, "messages": TURNS * 260_000},
    ),
    Body("260,000 messages (chat)", "/v1/chat/completions", lambda: {"messages": TURNS * 260_000}),
    Body("260,000 items", "/v1/responses", lambda: {"input": TURNS * 260_000}),
    Body("260,000 messages (Ollama)", "/api/chat", lambda: {"messages": TURNS * 260_000}),
    Body("4,096 messages", "/v1/chat/completions", lambda: {"messages": TURNS * 4096}),
    Body("4,096 items", "/v1/responses", lambda: {"input": TURNS * 4096}),
    Body(
        "700,000 unknown fields",
        "/generate",
        lambda: {"text": "a", **{f"{n:x}": 1 for n in range(700_000)}},
    ),
    Body("4.1 M input_ids", "/generate", lambda: {"input_ids": [1] * 4_100_000}),
    Body("500,000 input_ids", "/generate", lambda: {"input_ids": [1] * 500_000}),
    Body("8 sequences of 70,000 input_ids", "/generate", lambda: {"input_ids": [[1] * 70_000] * 8}),
    Body(
        "a 0.3 MB tool definition",
        "/v1/chat/completions",
        lambda: {"messages": TURNS, "tools": [TOOL], "max_tokens": 1},
    ),
    Body("1 MB prompt", "/tokenize", lambda: {"prompt": "a b " * 250_000}),
    Body("25 kB prompt", "/tokenize", lambda: {"prompt": "a b " * 6_500}),
    Body("7 MB prompt", "/generate", lambda: {"text": "a b " * 1_800_000}),
    Body(
        "8 texts of 1 MB",
        "/v1/embeddings",
        lambda: {"input": ["a b " * 240_000] * 8},
    ),
    Body(
        "2,000 documents",
        "/v1/rerank",
        lambda: {"query": "a", "documents": ["a b"] * 2000},
    ),
    Body(
        "500,000 query ids",
        "/v1/score",
        lambda: {"query": [1] * 500_000, "items": ["a"], "label_token_ids": [1]},
    ),
)


class Pair(msgspec.Struct, frozen=True):
    """A window without the body and the one with it.

    Attributes:
        quiet_ms, loud_ms: p99 of the gaps of all streams.
        longest_ms: The longest gap of the window with the body.
        status: Of the reply to the body.
        reply_ms: Until that reply.
    """

    quiet_ms: float
    loud_ms: float
    longest_ms: float
    status: int
    reply_ms: float

    @property
    def difference_ms(self) -> float:
        """What the body costs the other tenant."""
        return self.loud_ms - self.quiet_ms


class Case(msgspec.Struct, frozen=True):
    """The windows of one body."""

    name: str
    path: str
    size_bytes: int
    pairs: tuple[Pair, ...]

    @property
    def difference_ms(self) -> float:
        """The median."""
        return median(pair.difference_ms for pair in self.pairs)


class Report(msgspec.Struct, frozen=True):
    """What a run found; it raises if a stream ends early or a request is refused."""

    machine: Machine
    streams: int
    tokens: int
    cases: tuple[Case, ...]


def summarize(report: Report) -> Summary:
    """Reduce a run to the rows of its page section."""
    rows: list[Measurement] = []
    for one in report.cases:
        case, pairs = f"{one.name}, `{one.path}`", one.pairs
        rows += [
            single("size_bytes", one.size_bytes, case=case),
            measured("status", (pair.status for pair in pairs), case=case, by_round=True),
            measured("reply_ms", (pair.reply_ms for pair in pairs), case=case),
            measured("gap_p99_ms", (pair.quiet_ms for pair in pairs), case=case, arm="without"),
            measured("gap_p99_ms", (pair.loud_ms for pair in pairs), case=case, arm="with"),
            measured("gap_max_ms", (pair.longest_ms for pair in pairs), case=case, arm="with"),
            measured(
                "difference_ms", (pair.difference_ms for pair in pairs), case=case, by_round=True
            ),
        ]
    return Summary(
        section="bodies",
        machine=report.machine,
        setup={
            "streams": report.streams,
            "tokens": report.tokens,
            "rounds": max(len(case.pairs) for case in report.cases),
            "difference_ms_max": DIFFERENCE_MS_MAX,
        },
        rows=tuple(rows),
    )


async def run(stack: Stack, rounds: int) -> tuple[int, tuple[Case, ...]]:
    """Measure body by body; each is made only while it is used."""
    async with aiohttp.ClientSession(headers=_bearer(OTHER)) as session:
        began = time.perf_counter()
        await _window(session, stack, 200)
        began = time.perf_counter()
        await _window(session, stack, 200)
        tokens = min(TOKENS_MAX, int(200 * WINDOW_S / (time.perf_counter() - began)))
        cases: list[Case] = []
        for body in BODIES:
            data = msgspec.json.encode(body.make())
            pairs = [await _pair(session, stack, body.path, data, tokens) for _ in range(rounds)]
            cases.append(Case(body.name, body.path, len(data), tuple(pairs)))
    return tokens, tuple(cases)


async def _pair(
    session: aiohttp.ClientSession, stack: Stack, path: str, data: bytes, tokens: int
) -> Pair:
    quiet = await _window(session, stack, tokens)
    async with asyncio.TaskGroup() as group:
        posted = group.create_task(_posted(stack.url, path, data))
        loud = await _window(session, stack, tokens)
    status, reply_ms = posted.result()
    return Pair(
        round(_p99(quiet), 1), round(_p99(loud), 1), round(max(loud), 1), status, round(reply_ms, 1)
    )


async def _window(session: aiohttp.ClientSession, stack: Stack, tokens: int) -> list[float]:
    """Gaps in ms of streams that begin together, and of which each one has all of its tokens."""
    async with asyncio.TaskGroup() as group:
        streams = [
            group.create_task(_stream(session, stack, tokens, seed)) for seed in range(STREAMS)
        ]
    return [gap for stream in streams for gap in stream.result()]


async def _stream(
    session: aiohttp.ClientSession, stack: Stack, tokens: int, seed: int
) -> list[float]:
    body = {
        "messages": [{"role": "user", "content": f"Tell a story of {seed}."}],
        "stream": True,
        "max_tokens": tokens,
        "ignore_eos": True,
        "seed": seed,
        "stream_options": {"include_usage": True},
    }
    gaps: list[float] = []
    last = b""
    before: float | None = None
    async with session.post(f"{stack.url}/v1/chat/completions", json=body) as reply:
        assert reply.status == 200, f"a stream of the other tenant: {await reply.text()}"
        async for line in reply.content:
            if not line.startswith(b"data: {"):
                continue
            now = time.perf_counter()
            if before is not None:
                gaps.append(1000 * (now - before))
            before, last = now, line
    usage = msgspec.json.decode(last.removeprefix(b"data: ")).get("usage") or {}
    assert usage.get("completion_tokens") == tokens, f"a stream ended early: {last!r}"
    return gaps


async def _posted(url: str, path: str, data: bytes) -> tuple[int, float]:
    """Post the body from a thread: its bytes must not wait for the loop that takes the times."""
    await asyncio.sleep(AFTER_S)
    began = time.perf_counter()
    status = await asyncio.to_thread(_post, url, path, data)
    return status, 1000 * (time.perf_counter() - began)


def _post(url: str, path: str, data: bytes) -> int:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=120)
    try:
        headers = {"Content-Type": "application/json", **_bearer(SENDER)}
        connection.request("POST", path, data, headers)
        reply = connection.getresponse()
        reply.read()
        return reply.status
    finally:
        connection.close()


def _bearer(tenant: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key_of(tenant)}"}


def _p99(gaps: Sequence[float]) -> float:
    return quantiles(gaps, n=100)[-1]


def table(cases: Sequence[Case]) -> Table:
    """A row a body."""
    shown = Table("body", "MB", "status", "reply ms", "p99 quiet ms", "p99 beside ms", "difference")
    for case in cases:
        shown.add_row(
            case.name,
            f"{case.size_bytes / 1e6:.1f}",
            ", ".join(sorted({str(pair.status) for pair in case.pairs})),
            f"{median(pair.reply_ms for pair in case.pairs):.0f}",
            f"{median(pair.quiet_ms for pair in case.pairs):.1f}",
            f"{median(pair.loud_ms for pair in case.pairs):.1f}",
            f"{case.difference_ms:+.1f}",
        )
    return shown


def main() -> None:
    """Measure, print, write; raise if the promise is not kept."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.bodies", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path, default=FILE)
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.json"
        write_keys(keys, {SENDER: {}, OTHER: {}})
        with serving("--access-keys-file", str(keys)) as stack:
            tokens, cases = asyncio.run(run(stack, arguments.rounds))
    Console(width=140).print(table(cases))
    report = Report(machine(), STREAMS, tokens, cases)
    write_results(arguments.json, report, summarize(report))
    late = [case.name for case in cases if case.difference_ms > DIFFERENCE_MS_MAX]
    assert not late, f"more than {DIFFERENCE_MS_MAX:g} ms: {late}"


if __name__ == "__main__":
    main()
