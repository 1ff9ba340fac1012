"""Minutes of random load with aborts in every state: nothing stays allocated, and no memory grows.

    python -m tests.bench.soak --minutes 10

A stack of real processes serves the embedded model with so small a cache that requests wait, share
prefixes and are retracted. Clients send requests over HTTP and NATS and abandon most of them: at
once, while queued, during prefill, or between two tokens. Afterwards everything must be empty by
the services' own metrics, and the resident memory of each service flat: the slope of a line through
the second half of its samples.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import aiohttp
import numpy as np
from tests.bench.services import metrics_urls, scrape
from tests.bench.summary import Measurement, Summary, arguments, here, report, single
from tests.system.stack import Stack, serving

from antiphon.client import Client
from antiphon.wire.errors import EngineError
from antiphon.wire.sampling import Grammar, GrammarKind, TokenOutputParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CLIENTS = 24
RUNNING_MAX = 16
FLAGS = (
    *("--batching-running-max", str(RUNNING_MAX)),
    # Small, so that all of it has been written to before the second half: until then it grows.
    *("--cache-tokens-max", "2048"),
    *("--batching-conservativeness", "0.05"),
    *("--scheduler-queue-max", "12"),
    # Ended requests leave tombstones until their deadlines: these must come within the first half.
    *("--gateway-request-timeout-s", "30"),
)
SAMPLE_S = 1.0
EMPTY_WITHIN_S = 30.0
GROWTH_KIB_MAX = 5 * 1024.0
"""Most that a line through the second half of a run may climb in that half. What allocators and
caches still settle is below it, and of ten minutes a leak of 300 bytes a request is above."""
EMPTY = (
    "antiphon_kv_used_tokens",
    "antiphon_num_running_reqs",
    "antiphon_num_queue_reqs",
    "antiphon_held_reqs",
    "antiphon_num_open_reqs",
)
"""Gauges that are zero without requests."""
_REFUSED = ("503", "overloaded")
LONG_WORDS = 700
STEM = "You are a patient helper who counts, copies and remembers. " * 12


def soak(minutes: float, seed: int = 0) -> Summary:
    """Run a stack under load for so long, and look at what is left: the notes are failures."""
    with serving(*FLAGS) as stack:
        return asyncio.run(_soak(stack, minutes, seed))


async def _soak(stack: Stack, minutes: float, seed: int) -> Summary:
    urls = await metrics_urls(stack)
    pids = stack.pids()
    samples: dict[str, list[tuple[float, int]]] = {name: [] for name in pids}
    outcomes: Counter[str] = Counter()
    ends_at = time.monotonic() + 60 * minutes
    async with Client(stack.nats_url) as client, aiohttp.ClientSession() as session:
        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                dice = random.Random(seed * CLIENTS + number)
                group.create_task(_Asker(stack, client, session, dice, outcomes).run(ends_at))
            group.create_task(_watch(pids, samples, ends_at))
        gateway = urls["gateway-0"]  # it shows the whole model
        left = await asyncio.to_thread(_settled, gateway)
    counted = scrape(gateway)
    rows = [
        *(single("requests", count, case=name) for name, count in sorted(outcomes.items())),
        *(single("left", count, arm=name) for name, count in left.items()),
        *(row for name, points in samples.items() for row in _growth(name, points)),
    ]
    failures = _failures(rows, minutes)
    if stack.pids() != pids:
        failures.append("a service has died")
    setup = {
        "seed": seed,
        "minutes": minutes,
        "requests": outcomes.total(),
        "output_tokens": int(counted['antiphon_realtime_tokens_total{mode="decode"}']),
        "retractions": int(counted["antiphon_num_retractions_total"]),
        "growth_kib_max": GROWTH_KIB_MAX,
    }
    return here("soak", setup, rows, notes=failures)


def _failures(rows: Sequence[Measurement], minutes: float) -> list[str]:
    failures: list[str] = []
    for row in rows:
        match row.quantity:
            case "left" if row.middle:
                failures.append(f"{row.arm} = {row.middle:g}")
            case "kib_per_minute" if row.middle * minutes / 2 > GROWTH_KIB_MAX:
                failures.append(f"{row.arm} grows by {row.middle:.0f} KiB a minute")
            case "requests" if "internal" in row.case:
                failures.append(f"{row.middle:.0f} requests: {row.case}")
            case _:
                pass
    return failures


class _More(TypedDict, total=False):
    details: TokenOutputParams
    grammar: Grammar


@dataclass(frozen=True)
class _Asker:
    """One client, which asks at random and often leaves."""

    stack: Stack
    client: Client
    session: aiohttp.ClientSession
    dice: random.Random
    outcomes: Counter[str]

    async def run(self, ends_at: float) -> None:
        """Ask one thing after the other. What is still open at the end is left, too."""
        ways: Sequence[Callable[[], object]] = (self._over_nats, self._streamed, self._whole)
        while (left_s := ends_at - time.monotonic()) > 0:
            way = self.dice.choice(ways)
            leaves_s = self.dice.expovariate(2.0) if self.dice.random() < 0.6 else 60.0
            try:
                async with asyncio.timeout(min(leaves_s, left_s)):
                    outcome = await way()  # pyright: ignore[reportGeneralTypeIssues]
            except TimeoutError:
                outcome = "left at some time"
            except EngineError as error:
                outcome = error.code
            if outcome in _REFUSED:
                await asyncio.sleep(self.dice.expovariate(2.0))
            self.outcomes[f"{way.__name__.strip('_')}: {outcome}"] += 1

    async def _over_nats(self) -> str:
        dice = self.dice
        options: _More = {}
        if dice.random() < 0.5:
            options["details"] = TokenOutputParams(logprobs=True, top=2, prompt_start=0)
        if dice.random() < 0.2:
            options["grammar"] = Grammar(kind=GrammarKind.REGEX, text="[a-z]+( [a-z]+)*")
        answer = self.client.generate(
            self.stack.model,
            self._prompt(),
            max_tokens=dice.choice([1, 20, 200]),
            n=dice.choice([1, 1, 3]),
            stop=dice.choice([(), ("e",)]),
            timeout_s=dice.choice([0.3, 20.0, 20.0]),
            ignore_eos=dice.random() < 0.6,
            **options,
        )
        pieces = dice.choice([1, 3, 1000])
        async for _ in answer:
            pieces -= 1
            if not pieces:
                await answer.aclose()
                return "left after a piece"
        return "ended"

    async def _streamed(self) -> str:
        events = self.dice.choice([1, 5, 1000])
        async with self._post({"stream": True}) as reply:
            async for line in reply.content:
                if line.startswith(b"data:"):
                    events -= 1
                if not events:
                    reply.close()
                    return "left after an event"
            return "ended" if reply.status == 200 else str(reply.status)

    async def _whole(self) -> str:
        async with self._post({"n": self.dice.choice([1, 2])}) as reply:
            await reply.read()
            return "ended" if reply.status == 200 else str(reply.status)

    def _post(self, more: dict[str, object]) -> aiohttp.client._RequestContextManager:
        body: dict[str, object] = {
            "model": self.stack.model,
            "messages": [{"role": "user", "content": self._prompt()}],
            "max_tokens": self.dice.choice([1, 20, 200]),
            "temperature": self.dice.choice([0, 1]),
            "logprobs": self.dice.random() < 0.2,
        }
        return self.session.post(f"{self.stack.url}/v1/chat/completions", json=body | more)

    def _prompt(self) -> str:
        dice = self.dice
        match dice.randrange(4):
            case 0:
                return f"Count from {dice.randrange(50)} to {dice.randrange(50, 90)}."
            case 1:
                return STEM + f"What is {dice.randrange(90)} + {dice.randrange(90)}?"
            case 2:
                words = ("one", "two", "sky", "red", "cat")
                return " ".join(dice.choice(words) for _ in range(dice.randrange(LONG_WORDS)))
            case _:
                return "Say hello."


async def _watch(
    pids: dict[str, int], samples: dict[str, list[tuple[float, int]]], ends_at: float
) -> None:
    began = time.monotonic()
    while (now := time.monotonic()) < ends_at:
        for name, pid in pids.items():
            samples[name].append((now - began, _resident_kib(pid)))
        await asyncio.sleep(SAMPLE_S)


def _resident_kib(pid: int) -> int:
    """What it has of memory. It lives: a soak in which a service dies ends here."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4


def _growth(name: str, points: list[tuple[float, int]]) -> list[Measurement]:
    seconds, kib = np.array(points[len(points) // 2 :]).T
    slope = float(np.polyfit(seconds / 60, kib, 1)[0])
    return [
        single("first_kib", points[0][1], arm=name),
        single("last_kib", points[-1][1], arm=name),
        single("kib_per_minute", round(slope, 1), arm=name),
    ]


def _settled(url: str) -> dict[str, float]:
    """What is left of each that should be zero, as soon as all are, or when the time is over."""
    until = time.monotonic() + EMPTY_WITHIN_S
    while True:
        counted = scrape(url)
        left = {name: counted[name] for name in EMPTY}
        left["slots"] = RUNNING_MAX - counted["antiphon_free_slots"]
        if not any(left.values()) or time.monotonic() > until:
            return left
        time.sleep(0.25)


def main() -> int:
    parser = arguments(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    summary = soak(given.minutes, given.seed)
    report(summary, given.json)
    return 1 if summary.notes else 0


if __name__ == "__main__":
    sys.exit(main())
