"""Cost of a long queue for running requests: decode at batch 64 with 2,000 queued, and alone.

The running requests are the same in both runs, and the same window of their output is compared, so
that only the queue differs. It forms once all of them have started to stream: before, it would
delay some of them more than others. The position in the output is the server's token count, since
encoding the text again counts too many tokens: a later window has longer contexts, each 100 tokens
of which take a tenth of a step. The order alternates, the cache is full before the first pair, and
a pair that other processes disturb is measured again. Expected: no difference beyond noise, since
the queue is examined only when there is room.

The load generator shares the cores with the server. Its garbage collector is off during a window,
in both runs: in one of them it would scan 2,000 waiting clients.

    python -m tests.bench.serving.waiting
    python -m tests.bench.serving.waiting --rehearse   one pair, without waiting for an idle machine
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from statistics import quantiles
from typing import TYPE_CHECKING

from tests.bench.models import CACHE, LLAMA_135M, Model, made
from tests.bench.peers.peer import Server, running
from tests.bench.peers.quiet import BUSY_MAX, Busy, watched
from tests.bench.peers.servers import Antiphon
from tests.bench.services import scrape
from tests.bench.serving.client import HttpTarget, Timeline
from tests.bench.serving.load import ClosedLoop, RandomLengths, Script, Vocabulary, play
from tests.bench.serving.metrics import measure
from tests.bench.serving.report import Run, summarize_pairs
from tests.bench.summary import RESULTS, report

if TYPE_CHECKING:
    from collections.abc import Sequence


RUNNING = 64
WAITING = 2000
PAIRS = 5
DATASET = RandomLengths(128, 400)
WINDOW = (150, 390)
"""Which tokens of each answer are timed: the queue must stand before the first of them."""
POLL_S = 0.2
OPEN = "antiphon_num_open_reqs"
SETTINGS = (
    *("--max-running-requests", str(RUNNING), "--max-queued-requests", str(2 * WAITING)),
    *("--gateway-requests-max", str(2 * WAITING), "--queue-waiting-max", str(2 * WAITING)),
    *("--scheduler-look-ahead", str(2 * WAITING), "--cache-tokens-max", str(RUNNING * 600)),
)
COUNTED = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


@dataclass(frozen=True)
class Decode:
    """The window, which begins when the last request comes to the first token of it."""

    began_s: float
    tokens_per_s: float
    gap_p99_ms: float


@dataclass(frozen=True)
class Sample:
    """One run, and how long its queue took to form."""

    run: Run
    decode: Decode
    formed_in_s: float


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.serving.waiting")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--rehearse", action="store_true", help="one pair, and nothing is written")
    arguments = parser.parse_args()
    pairs, busy_max = (1, 1.0) if arguments.rehearse else (arguments.pairs, BUSY_MAX)
    model = made(LLAMA_135M)
    antiphon = Antiphon(CACHE, os.cpu_count() or 1, SETTINGS)
    try:
        with running(antiphon, model) as server:
            found = asyncio.run(_pairs(model, server, pairs, busy_max))
    except Busy as error:
        sys.exit(f"not measured: {error}")
    runs = [sample.run for pair in found for sample in pair]
    summary = summarize_pairs("waiting", runs, by_round(found), {}, peer=antiphon, model=model)
    report(summary, None if arguments.rehearse else RESULTS / "waiting.json", runs)


def by_round(pairs: Sequence[tuple[Sample, Sample]]) -> dict[str, list[float]]:
    alone, beside = ([each.decode for each in arm] for arm in zip(*pairs, strict=True))
    return {
        "tokens_per_s_alone": [each.tokens_per_s for each in alone],
        "tokens_per_s_beside_2000": [each.tokens_per_s for each in beside],
        "ratio": [b.tokens_per_s / a.tokens_per_s for a, b in zip(alone, beside, strict=True)],
        "gap_p99_ms_alone": [each.gap_p99_ms for each in alone],
        "gap_p99_ms_beside_2000": [each.gap_p99_ms for each in beside],
        "queue_formed_in_s": [each.formed_in_s for _, each in pairs],
    }


async def _pairs(
    model: Model, server: Server, pairs: int, busy_max: float
) -> list[tuple[Sample, Sample]]:
    """Measure without a queue and with one, in turn.

    Raises:
        Busy: Others disturbed more than every second pair.
    """
    words = Vocabulary(model.folder)
    found: list[tuple[Sample, Sample]] = []
    async with HttpTarget(server.url, server.model, more=COUNTED) as target:
        await play(DATASET.scripts(words, RUNNING, 1_000_000), ClosedLoop(RUNNING), target)
        for pair in range(2 * pairs):
            order = (0, WAITING) if pair % 2 == 0 else (WAITING, 0)
            seen = {each: await _sample(pair, each, words, target, server) for each in order}
            others = max(sample.run.others or 0.0 for sample in seen.values())
            ratio = seen[WAITING].decode.tokens_per_s / seen[0].decode.tokens_per_s
            print(f"pair {pair}: {ratio:.3f}, others use {others:.0%}", flush=True)
            if others <= busy_max:
                found.append((seen[0], seen[WAITING]))
            if len(found) == pairs:
                return found
    raise Busy(f"others disturbed {2 * pairs - len(found)} of {2 * pairs} pairs")


async def _sample(
    pair: int, waiting: int, words: Vocabulary, target: HttpTarget, server: Server
) -> Sample:
    seed = 2 * pair + bool(waiting)
    scripts = DATASET.scripts(words, RUNNING, seed)
    queue = RandomLengths(128, 16).scripts(words, waiting, 1000 + pair)
    gc.collect()
    gc.disable()
    try:
        playing = _played(scripts, queue, target, server)
        (timelines, asked_s, formed_s), others = await watched(playing, server.pid)
    finally:
        gc.enable()
    decode = decoded(timelines)
    assert formed_s < decode.began_s, "the queue was not complete when the window began: prolong it"
    run = Run(
        name=f"{waiting} waiting, {pair}",
        dataset=str(DATASET),
        arrival=f"closed:{RUNNING}",
        over="http",
        seed=seed,
        metrics=measure(timelines, words.tokens),
        others=others,
    )
    return Sample(run, decode, formed_s - asked_s)


async def _played(
    scripts: Sequence[Script], queue: Sequence[Script], target: HttpTarget, server: Server
) -> tuple[Sequence[Timeline], float, float]:
    """Return the timelines of the running requests, and when the queue was sent and complete."""
    sent_s = formed_s = 0.0
    async with asyncio.TaskGroup() as group:
        seen = group.create_task(play(scripts, ClosedLoop(RUNNING), target))
        await _answering(target, RUNNING)
        if queue:
            sent_s = time.perf_counter()
            waiters = group.create_task(play(queue, ClosedLoop(len(queue)), target))
            formed_s = await _open(server, RUNNING + len(queue))
            seen.add_done_callback(lambda _: waiters.cancel())
        timelines = await seen
    await _open(server, 0)
    return timelines, sent_s, formed_s


def decoded(timelines: Sequence[Timeline]) -> Decode:
    """Look at what came from when the window had begun for all until it ended for one."""
    arrivals = [_arrivals(timeline) for timeline in timelines]
    began_s = max(times[WINDOW[0]] for times in arrivals)
    ended_s = min(times[WINDOW[1]] for times in arrivals)
    count = sum(began_s < at_s <= ended_s for times in arrivals for at_s in times)
    gaps_ms = [
        1000 * (piece.at_s - before.at_s)
        for timeline in timelines
        for before, piece in pairwise(timeline.pieces)
        if began_s < piece.at_s <= ended_s
    ]
    return Decode(began_s, count / (ended_s - began_s), quantiles(gaps_ms, n=100)[-1])


def _arrivals(timeline: Timeline) -> list[float]:
    """When each token was there: those that came together were made one a step."""
    assert timeline.error is None, timeline.error
    before_s, times = timeline.pieces[0].at_s, list[float]()
    for piece in timeline.pieces:
        assert piece.tokens is not None, "the server does not count the tokens of each piece"
        count = piece.tokens - len(times)
        times += (before_s + (piece.at_s - before_s) * n / count for n in range(1, count + 1))
        before_s = piece.at_s
    return times


async def _answering(target: HttpTarget, count: int) -> None:
    async with asyncio.timeout(120):
        while target.answering < count:  # noqa: ASYNC110  # counted by the reads of many streams
            await asyncio.sleep(POLL_S)


async def _open(server: Server, count: int) -> float:
    """Wait until the gateway holds so many requests, no fewer and no more; return when."""
    async with asyncio.timeout(120):
        while (await asyncio.to_thread(scrape, server.url))[OPEN] != count:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
    return time.perf_counter()


if __name__ == "__main__":
    main()
