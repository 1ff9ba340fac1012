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

import asyncio
import http.client
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import msgspec
from tests.bench.serving.client import HttpTarget
from tests.bench.serving.load import ClosedLoop, Script, play
from tests.bench.summary import Measurement, Summary, arguments, here, measured, report, single
from tests.system.stack import Stack, serving
from tests.unit.gateway.keyed import key_of, write_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

ROUNDS = 5
STREAMS = 8
WINDOW_S = 4.0
"""About how long the streams of a window last; their tokens are chosen for it."""
TOKENS_MAX = 1900
AFTER_S = 0.5
"""From the beginning of a window to its body."""
DIFFERENCE_MS_MAX = 300.0
SENDER, OTHER = "sender", "other"

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
    Body("8 texts of 1 MB", "/v1/embeddings", lambda: {"input": ["a b " * 240_000] * 8}),
    Body("2,000 documents", "/v1/rerank", lambda: {"query": "a", "documents": ["a b"] * 2000}),
    Body(
        "500,000 query ids",
        "/v1/score",
        lambda: {"query": [1] * 500_000, "items": ["a"], "label_token_ids": [1]},
    ),
)


class Pair(msgspec.Struct, frozen=True):
    """A window without the body and the one with it.

    `quiet_ms` and `loud_ms` are p99 of the gaps of all streams, `longest_ms` is the longest one of
    the window with the body; status and time are those of the reply to it.
    """

    quiet_ms: float
    loud_ms: float
    longest_ms: float
    status: int
    reply_ms: float

    @property
    def difference_ms(self) -> float:
        return self.loud_ms - self.quiet_ms


def rows(body: Body, size_bytes: int, pairs: Sequence[Pair]) -> list[Measurement]:
    case = f"{body.name}, `{body.path}`"
    return [
        single("size_bytes", size_bytes, case=case),
        measured("status", (pair.status for pair in pairs), case=case, by_round=True),
        measured("reply_ms", (pair.reply_ms for pair in pairs), case=case),
        measured("gap_p99_ms", (pair.quiet_ms for pair in pairs), case=case, arm="without"),
        measured("gap_p99_ms", (pair.loud_ms for pair in pairs), case=case, arm="with"),
        measured("gap_max_ms", (pair.longest_ms for pair in pairs), case=case, arm="with"),
        measured("difference_ms", (pair.difference_ms for pair in pairs), case=case, by_round=True),
    ]


async def run(stack: Stack, rounds: int) -> tuple[Summary, Mapping[str, Sequence[Pair]]]:
    """Measure body by body; each is made only while it is used.

    Raises:
        AssertionError: A stream was refused or ended early.
    """
    found: list[Measurement] = []
    raw: dict[str, Sequence[Pair]] = {}
    # Sampled: a greedy answer may repeat a token whose text is empty, which is no event.
    more = {"temperature": 1.0}
    async with HttpTarget(
        stack.url, stack.model, chat=True, more=more, headers=_bearer(OTHER)
    ) as target:
        await _window(target, 200)
        began = time.perf_counter()
        await _window(target, 200)
        tokens = min(TOKENS_MAX, int(200 * WINDOW_S / (time.perf_counter() - began)))
        for body in BODIES:
            data = msgspec.json.encode(body.make())
            pairs = [await _pair(target, stack, body.path, data, tokens) for _ in range(rounds)]
            found += rows(body, len(data), pairs)
            raw[body.name] = pairs
    setup = {"streams": STREAMS, "tokens": tokens, "rounds": rounds}
    return here("bodies", setup | {"difference_ms_max": DIFFERENCE_MS_MAX}, found), raw


async def _pair(target: HttpTarget, stack: Stack, path: str, data: bytes, tokens: int) -> Pair:
    quiet = await _window(target, tokens)
    async with asyncio.TaskGroup() as group:
        posted = group.create_task(_posted(stack.url, path, data))
        loud = await _window(target, tokens)
    status, reply_ms = posted.result()
    quiet_ms, loud_ms, longest_ms = _p99(quiet), _p99(loud), round(max(loud), 1)
    return Pair(quiet_ms, loud_ms, longest_ms, status, round(reply_ms, 1))


async def _window(target: HttpTarget, tokens: int) -> list[float]:
    """Gaps in ms of streams that begin together, and of which each one has all of its tokens."""
    scripts = [Script((f"Tell a story of {n}.",), 0, tokens) for n in range(STREAMS)]
    timelines = await play(scripts, ClosedLoop(STREAMS), target)
    for timeline in timelines:
        assert timeline.error is None, f"a stream of the other tenant: {timeline.error}"
        assert timeline.output_tokens == tokens, f"ended after {timeline.output_tokens} tokens"
    return [
        1000 * (piece.at_s - before.at_s)
        for timeline in timelines
        for before, piece in pairwise(timeline.pieces)
    ]


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
    return round(quantiles(gaps, n=100)[-1], 1)


def main() -> None:
    """Measure, print, write; raise if a difference is above its limit."""
    given = arguments(description=__doc__, rounds=ROUNDS, file="bodies.json").parse_args()
    with TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.json"
        write_keys(keys, {SENDER: {}, OTHER: {}})
        with serving("--access-keys-file", str(keys)) as stack:
            summary, raw = asyncio.run(run(stack, given.rounds))
    report(summary, given.json, raw)
    differences = [row for row in summary.rows if row.quantity == "difference_ms"]
    late = [row.case for row in differences if row.middle > DIFFERENCE_MS_MAX]
    assert not late, f"more than {DIFFERENCE_MS_MAX:g} ms: {late}"


if __name__ == "__main__":
    main()
